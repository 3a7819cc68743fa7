"""The model of a run, ready to be used: whole, or up to one of its early exits, which is a smaller model."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor, nn

from fedel.data.dataset import Dataset
from fedel.data.model_input import ModelInput, Normalisation
from fedel.errors import ConfigError, ModelError
from fedel.job import RunConfig
from fedel.models.blocks import BlockModel
from fedel.models.registry import make
from fedel.records import best_of
from fedel.report import runs
from fedel.seeds import derive
from fedel.strategies import build as build_strategy
from fedel.types import Tensors

OwnModel = nn.Module | Callable[..., nn.Module]
HEAD = "exit_head."
"""Before the names of an exit's tensors, where the user's own module has none for them."""


def trained(
    run_directory: str | Path,
    exit: int | None = None,
    round: str | int = "best",
    *,
    normalise: bool = False,
    model: OwnModel | None = None,
    data: Dataset | None = None,
) -> nn.Module:
    """The model of a run in evaluation mode, without gradients.

    ``exit`` is the block after which it ends; without one, it is what the run tested: your own module, or the
    mean over several exits where the method has that (DepthFL). ``round`` is ``best``, ``last`` or the number
    of a round that was kept, counted from 1. With ``normalise`` it takes images as they are stored, 0 to 255.
    ``model`` and ``data`` are those of a run that was started from Python with objects instead of names.
    """
    return load(run_directory, round, model=model, data=data).module(exit, normalise)


def load(
    run_directory: str | Path,
    round: str | int = "best",
    *,
    model: OwnModel | None = None,
    data: Dataset | None = None,
) -> TrainedModel:
    """Read a run's model; the data is needed only where the run does not say what the model takes."""
    run = runs.load(run_directory)
    job = job_of(run)
    number, file = _file_of(run, round)
    takes = ModelInput.load(run.path) if data is None else ModelInput.of(data)
    if takes is None:
        from fedel.training.factory import make_data

        takes = ModelInput.of(make_data(job))
    if isinstance(model, nn.Module):
        given = model
        model = lambda: copy.deepcopy(given)  # noqa: E731
    with torch.random.fork_rng(devices=[]):
        # What is not exchanged, such as a layer in no block, has the values that it had in the run.
        torch.manual_seed(derive(job.seed, "initial model"))
        own, network = make(
            model or job.workload.model,
            sample_input=torch.from_numpy(takes.samples(2)),
            num_classes=len(takes.classes),
            **job.workload.model_options,
        )
    network.load(_read(file))
    if not {id(p) for p in network.blocks.parameters()} <= {id(p) for p in own.parameters()}:
        own = network  # blocks() made copies of layers, and what was trained are the copies
    return TrainedModel(run, job, number, takes, own.eval(), network.eval().requires_grad_(False))


@dataclass(frozen=True)
class TrainedModel:
    """A run's network with the values of one round."""

    run: runs.StoredRun
    job: RunConfig
    round: int
    """Counted from 1."""
    takes: ModelInput
    own: nn.Module
    """As the model's function returned it; the network has its layers."""
    network: BlockModel

    def exits(self, exit: int | None) -> tuple[int, ...]:
        """The exits that answer: the one given, or those that the run's method tests."""
        last = self.network.spec.num_blocks
        if exit is None:
            return build_strategy(self.job.strategy).exits_to_average(self.network.spec) or (last,)
        if not 1 <= exit <= last:
            raise ModelError(
                f"{self.run.path}: there is no exit {exit}; model {self.network.spec.name} has the exits 1 to"
                f" {last}, one after each block ({', '.join(self.network.block_names)})"
            )
        return (exit,)

    def module(self, exit: int | None = None, normalise: bool = False) -> nn.Module:
        """What answers at this exit, with no other tensors than it needs."""
        exits = self.exits(exit)
        is_whole = exits == (self.network.spec.num_blocks,)
        module = self.own if is_whole and self._is_plain else Exits(self.network, exits)
        if normalise and self.takes.normalisation:
            module = nn.Sequential(OrderedDict(input=Normalise(self.takes), model=module))
        return module.eval().requires_grad_(False)

    def state_dict(self, exit: int | None = None) -> dict[str, Tensor]:
        """The tensors of ``module`` under the names that the user's own module has for them."""
        exits = self.exits(exit)
        if len(exits) > 1:
            listed = ", ".join(map(str, exits))
            raise ModelError(
                f"{self.run.path}: {self.run.method} tests the mean over the exits {listed},"
                " which no single network can hold; write it as pt2 or onnx, or choose one exit (--exit)"
            )
        needed = Exits(self.network, exits).state_dict(keep_vars=True)
        own = self.own.state_dict(keep_vars=True)
        is_whole = exits == (self.network.spec.num_blocks,) and self._is_plain
        ids = {id(value) for value in needed.values()}
        found = {name: value for name, value in own.items() if is_whole or id(value) in ids}
        named = {id(value) for value in own.values()}
        heads = {name: value for name, value in needed.items() if id(value) not in named}
        found |= {HEAD + name.partition(".")[2].partition(".")[2]: value for name, value in heads.items()}
        return {name: value.detach().clone().contiguous() for name, value in found.items()}

    def head(self, exit: int | None = None) -> str:
        """The layers of an early exit, for people; empty where the network's own classifier answers."""
        (*_, last) = self.exits(exit)
        name = self.network.block_names[last - 1]
        exits = self.network.exits
        return ", ".join(map(str, exits[name].children())) if name in exits else ""

    @property
    def _is_plain(self) -> bool:
        """Whether the user brought a module that knows nothing of blocks and exits."""
        return not isinstance(self.own, BlockModel)


class Exits(nn.Module):
    """A network up to the last of some exits: the logits of one, or the mean over several."""

    def __init__(self, network: BlockModel, exits: tuple[int, ...]) -> None:
        super().__init__()
        names = network.block_names[: max(exits)]
        self.blocks = nn.ModuleDict({name: network.blocks[name] for name in names})
        chosen = [network.block_names[block - 1] for block in exits]
        self.answers = frozenset(chosen)
        self.heads = nn.ModuleDict({name: network.exits[name] for name in chosen if name in network.exits})

    def forward(self, x: Tensor) -> Tensor:
        logits = []
        for name, block in self.blocks.items():
            x = block(x)
            if name in self.answers:
                logits.append(self.heads[name](x) if name in self.heads else x)
        return logits[0] if len(logits) == 1 else torch.stack(logits).mean(0)


class Normalise(nn.Module):
    """From stored values, such as the bytes of an image as floats, to what the network was trained on."""

    factor: Tensor
    shift: Tensor

    def __init__(self, takes: ModelInput) -> None:
        super().__init__()
        normalisation = takes.normalisation
        assert isinstance(normalisation, Normalisation)
        shape = (1, -1) + (1,) * (len(takes.shape) - 1)
        for name, values in zip(("factor", "shift"), normalisation.factors(), strict=True):
            self.register_buffer(name, torch.from_numpy(values).reshape(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor - self.shift


def job_of(run: runs.StoredRun) -> RunConfig:
    """The job of a stored run; a simulation has settings beside it."""
    ours = {field.name for field in dataclasses.fields(RunConfig)}
    if "workload" not in run.settings:
        raise ConfigError(f"{run.path}: config.toml is missing or has no [workload], so the model is not known")
    table = {key: value for key, value in run.settings.items() if key in ours}
    return RunConfig.parse(table, str(run.path / "config.toml"))


def kept_rounds(run: runs.StoredRun) -> dict[int, Path]:
    """The rounds of which the directory has the model, counted from 1, and the file of each."""
    kept = {
        int(file.stem.partition("-")[2]): file
        for file in sorted(run.path.glob("model-*.safetensors"))
        if file.stem.partition("-")[2].isdigit()
    }
    best = best_of(run.rounds)
    if best and (run.path / "best.safetensors").exists():
        kept[best.round + 1] = run.path / "best.safetensors"
    if run.result and (run.path / "model.safetensors").exists():
        kept[run.result.rounds] = run.path / "model.safetensors"
    return kept


def _file_of(run: runs.StoredRun, round: str | int) -> tuple[int, Path]:
    kept, best = kept_rounds(run), best_of(run.rounds)
    if not kept:
        raise ConfigError(
            f"{run.path} has no model: the run is not over; continue it (--resume, in Python resume=True)"
        )
    there = f"choose one of the rounds {', '.join(map(str, sorted(kept)))} (--round, in Python round=)"
    if round == "last":
        if run.result is None:
            raise ConfigError(
                f"{run.path}: the run is not over, so it has no last model; continue it (--resume, in Python"
                f" resume=True), or {there}"
            )
        number = run.result.rounds
    elif round == "best":
        if best is None:
            raise ConfigError(f"{run.path}: no round was tested, so none is the best; {there}")
        number = best.round + 1
    else:
        number = int(round) if str(round).isdigit() else 0
        if not number:
            raise ConfigError(f"--round {round}: write best, last or the number of a round; {there}")
    if number not in kept:
        raise ConfigError(f"{run.path} did not keep the model of round {number} (rounds.keep_every); {there}")
    return number, kept[number]


def _read(file: Path) -> Tensors:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); choose another round with --round") from None
