"""A trained model as one file for use elsewhere, without FedEL: tensors, a torch program, or ONNX.

A program contains the normalisation of images, so it takes what a user has (docs/decisions/0015).
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save

from fedel import __version__
from fedel.errors import ConfigError, ModelError
from fedel.files import open_atomic, write_atomic
from fedel.models.deploy import TrainedModel, kept_rounds

INPUT, OUTPUT = "input", "logits"
"""Names of an ONNX model's input and output."""
EXTRA_FILE = "fedel.json"
"""Holds the metadata in a pt2 file."""


def export(
    model: TrainedModel, file: Path, form: str, exit: int | None = None, normalise: bool = True
) -> dict[str, str]:
    """Write the file; returns the metadata that is in it."""
    if form not in FORMATS:
        raise ConfigError(f"format {form!r} is not one of: {', '.join(FORMATS)}")
    if file.resolve() in {kept.resolve() for kept in kept_rounds(model.run).values()}:
        raise ConfigError(f"{file} is the run's own file, which holds all exits; choose another --out")
    has_input = form != "safetensors" and normalise
    metadata = about(model, exit, has_input)
    FORMATS[form](model, file, exit, has_input, metadata)
    return metadata


def about(model: TrainedModel, exit: int | None, normalised: bool) -> dict[str, str]:
    """What somebody who finds the file has to know; lists are JSON."""
    takes, last = model.takes, model.network.spec.num_blocks
    said = {
        "made_by": f"FedEL {__version__}",
        "run": model.run.name,
        "round": str(model.round),
        "method": model.run.method,
        "job_sha256": hashlib.sha256((model.run.path / "config.toml").read_bytes()).hexdigest(),
        "model": model.network.spec.name,
        "exit": f"{', '.join(map(str, model.exits(exit)))} of {last}",
        "exit_head": model.head(exit),
        "input": takes.in_words(normalised),
        "input_shape": json.dumps(takes.shape),
        "classes": json.dumps(takes.classes),
    }
    if takes.normalisation:
        said |= {
            "scale": json.dumps(takes.normalisation.scale),
            "mean": json.dumps(takes.normalisation.mean),
            "std": json.dumps(takes.normalisation.std),
        }
    return said


def _safetensors(
    model: TrainedModel, file: Path, exit: int | None, _: bool, metadata: Mapping[str, str]
) -> None:
    write_atomic(file, save(model.state_dict(exit), dict(metadata)))


def _pt2(
    model: TrainedModel, file: Path, exit: int | None, normalise: bool, metadata: Mapping[str, str]
) -> None:
    with _quiet():
        program = _program(model, exit, normalise)
        with open_atomic(file) as stream:
            torch.export.save(program, stream, extra_files={EXTRA_FILE: json.dumps(metadata)})


def _onnx(
    model: TrainedModel, file: Path, exit: int | None, normalise: bool, metadata: Mapping[str, str]
) -> None:
    with _quiet():
        try:
            import onnx
            import onnxscript  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"writing ONNX needs the package '{error.name}': pip install 'fedel[export]'"
            ) from None
        program = torch.onnx.export(
            _program(model, exit, normalise),
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            verbose=False,
        )
        assert program is not None
        made = program.model_proto
        onnx.helper.set_model_props(made, dict(metadata))
        write_atomic(file, made.SerializeToString())


def _program(model: TrainedModel, exit: int | None, normalise: bool) -> torch.export.ExportedProgram:
    """Of any batch size."""
    example = torch.from_numpy(model.takes.samples(2))
    try:
        return torch.export.export(
            model.module(exit, normalise), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},)
        )
    except Exception as error:  # torch has many, of its own compiler
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ModelError(
            f"model {model.network.spec.name} cannot become a torch program ({reason}); keep Python code that"
            " depends on values out of its forward, or export safetensors"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's notes to its own developers, and about packages that are not needed."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


FORMATS: dict[str, Callable[[TrainedModel, Path, int | None, bool, Mapping[str, str]], None]] = {
    "safetensors": _safetensors,
    "pt2": _pt2,
    "onnx": _onnx,
}
