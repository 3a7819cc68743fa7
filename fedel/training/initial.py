"""The values that a run starts from, where its job names a file of them: ``[workload] initial``.

Only the machine that makes the first model reads the file: that of the person who runs the job. Servers and
devices get the values, never the file's name.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from fedel import plugins
from fedel.config import MAX_LISTED
from fedel.errors import ConfigError
from fedel.job import Workload
from fedel.models import BlockModel
from fedel.records import Origin

_log = logging.getLogger(__name__)
FORMATS = (".safetensors", ".pt", ".pth")


def origin_of(workload: Workload) -> Origin | None:
    """The file that the job names, and what is in it; ``None`` if it names none."""
    if not workload.initial:
        return None
    file = _path(workload)
    return Origin(str(file), hashlib.sha256(_content(file)).hexdigest())


def start_from_file(workload: Workload, own: nn.Module, model: BlockModel) -> None:
    """Load the file that the job names into the model; tensors that it does not give stay as they are.

    ``own`` is the module as the model's function returned it: the file may have its names, or FedEL's.
    """
    file = _path(workload)
    values = _values(file)
    names = _names_in(values, own, model)
    wanted = {name: values[its] for name, its in names.items() if its in values}
    shapes = {name: tensor.shape for name, tensor in model.spec.by_name.items()}
    other_shape = {name for name, value in wanted.items() if tuple(value.shape) != shapes[name]}
    taken = {name: value for name, value in wanted.items() if name not in other_shape}
    # A plain network has no exits, so its file cannot have them.
    missing = [n for n, t in model.spec.by_name.items() if n not in wanted and not t.in_exit]
    left_out = sorted(values.keys() - names.values() - own.state_dict().keys())
    if not taken:
        raise ConfigError(
            f"{file}: none of its {len(values)} tensors belongs to model {model.spec.name}; the file has"
            f" {_some(sorted(values))}, the model {_some(list(names.values()))}"
        )
    if workload.initial_strict and (missing or other_shape or left_out):
        raise ConfigError(
            f"{file} is not a file of model {model.spec.name}: "
            + "; ".join(
                _differences(names, missing, {n: (wanted[n], shapes[n]) for n in other_shape}, left_out)
            )
            + ". Correct the model or the file, or set workload.initial_strict = false: then what does not fit"
            " starts fresh"
        )
    if infinite := [names[name] for name, value in taken.items() if not bool(torch.isfinite(value).all())]:
        raise ConfigError(f"{file}: {_some(infinite)} holds NaN or Inf; take weights that work")
    model.load({**model.tensors(), **{name: value.float().numpy() for name, value in taken.items()}})
    fresh = [name for name in model.spec.by_name if name not in taken]
    kept = f"the run starts from {len(taken)} of its {len(shapes)} tensors in {file}"
    if lost := [name for name in fresh if not model.spec.by_name[name].in_exit]:
        _log.warning("%s; these start fresh: %s", kept, ", ".join(lost))
    else:
        _log.info("%s; %d tensors of exits start fresh", kept, len(fresh))
    if left_out:
        _log.warning("%s: the model has no place for: %s", file, ", ".join(left_out))


def _path(workload: Workload) -> Path:
    file = plugins.path_of(workload.initial, "workload.initial", ConfigError)
    if file.suffix not in FORMATS:
        raise ConfigError(f"workload.initial = '{file}': FedEL reads {', '.join(FORMATS)}, nothing else")
    return file


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"workload.initial = '{file}' cannot be read: {error.strerror}; it is searched from {Path.cwd()}"
        ) from None


def _values(file: Path) -> Mapping[str, Tensor]:
    content = _content(file)
    try:
        if file.suffix == FORMATS[0]:
            return load_safetensors(content)
        # Tensors alone: a pickle could run any code.
        values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise ConfigError(
            f"{file} holds no tensors that FedEL can read ({str(error).partition(chr(10))[0]}); save them with"
            " safetensors.torch.save_file(net.state_dict(), FILE)"
        ) from None
    if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
        raise ConfigError(f"{file} is not a state dict, name -> tensor; save net.state_dict() alone")
    return values


def _names_in(values: Collection[str], own: nn.Module, model: BlockModel) -> dict[str, str]:
    """FedEL's name of each tensor -> its name in the file: FedEL's too, or that of the user's own module."""
    ours = {name: name for name in model.spec.by_name}
    theirs = {id(value): name for name, value in own.state_dict(keep_vars=True).items()}
    tensors = model.state_dict(keep_vars=True)
    users = {name: theirs.get(id(tensors[name]), name) for name in ours}
    return max((ours, users), key=lambda names: sum(name in values for name in names.values()))


def _differences(
    names: Mapping[str, str],
    missing: list[str],
    other_shape: Mapping[str, tuple[Tensor, tuple[int, ...]]],
    left_out: list[str],
) -> list[str]:
    said = []
    if missing:
        said.append(f"it lacks {_some([names[name] for name in missing])}")
    if other_shape:
        shapes = [
            f"{names[name]} ({tuple(value.shape)} in the file, {shape} in the model)"
            for name, (value, shape) in sorted(other_shape.items())
        ]
        said.append(f"other shapes: {_some(shapes)}")
    if left_out:
        said.append(f"the model has no {_some(left_out)}")
    return said


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
