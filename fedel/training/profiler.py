"""The tensor timing profiler: what each part of a training step costs on this device (paper, section 4.1).

Measured inside real training steps, not part by part: blocks run in their order, with a cut between them,
and every autograd node is stamped. A step in which no weight asks for a gradient gives the way through
(t_g); steps in which only the first, second, ... tensor of every layer does give the updates (t_w).
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from fedel.models.blocks import BlockModel
from fedel.training import optim
from fedel.training.clock import seconds_between, stamp, timed
from fedel.training.elastic import Elastic, elastic
from fedel.training.graph import BEFORE_ALL, record_spans, timed_backward
from fedel.training.objective import objective
from fedel.types import Array, BlockTime, LocalWork, TensorSpec, TensorTime, TimingProfile, WidthTime

Progress = Callable[[int, int], None]
"""Called with the rounds of measurement done and to do."""

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class _Layer:
    """A layer with weights of its own."""

    module: nn.Module
    tensors: tuple[TensorSpec, ...]

    @property
    def carrier(self) -> str:
        """The tensor that carries the way through: a kernel, or a norm's last tensor as in ElasticTrainer."""
        return self.tensors[-1 if isinstance(self.module, _NORMS) else 0].name


@dataclass
class _Samples:
    """Repeated measurements by name; the median is what counts on a machine that others use."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, key: str, seconds: float) -> None:
        self.values.setdefault(key, []).append(seconds)

    def median(self, key: str) -> float:
        return statistics.median(self.values[key]) if key in self.values else 0.0


def profile(
    model: BlockModel,
    batch: tuple[Array, Array],
    work: LocalWork,
    device: str | torch.device = "cpu",
    *,
    widths: Sequence[float] = (),
    rounds: int = 15,
    fetch: Callable[[], object] | None = None,
    progress: Progress | None = None,
    device_name: str = "",
) -> TimingProfile:
    """Measure ``model`` on ``batch``, which stands for every batch of training.

    ``widths`` adds whole steps of the model narrowed to these shares; ``fetch`` makes one batch ready, and
    its time counts as overhead. The model's values are the same afterwards.
    """
    device = torch.device(device)
    model.to(device)
    before = model.tensors()
    bench = _Bench(model, torch.from_numpy(batch[0]), torch.from_numpy(batch[1]), work, device)
    narrowed = {w: model.narrow(w)[0].to(device) for w in widths if w < 1}
    try:
        for done in range(-1, rounds):
            if done == 0:
                bench.samples.values.clear()  # the first round only warmed up
            bench.measure(narrowed, fetch)
            if progress:
                progress(done + 1, rounds)
    finally:
        model.load(before)
    return bench.result(device_name or default_device_name(device), tuple(narrowed))


def default_device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.node() or 'cpu'} ({threads} CPU thread{'s' if threads > 1 else ''})"


class _Bench:
    def __init__(self, model: BlockModel, x: Tensor, y: Tensor, work: LocalWork, device: torch.device) -> None:
        self.model, self.x, self.y = model, x.to(device), y.to(device)
        self.work, self.device = work, device
        self.spec = model.spec
        self.exits = self.spec.exits_for(1, self.spec.num_blocks)
        self.layers = _layers_with_weights(model)
        self.samples = _Samples()

    def measure(self, narrowed: Mapping[float, BlockModel], fetch: Callable[[], object] | None) -> None:
        """One sample of everything, interleaved so that a slow moment of the machine hits all alike."""
        slots = max(len(layer.tensors) for layer in self.layers)
        self._whole_step("full", self.model)
        for slot in (None, *range(slots), "all"):
            self._stamped_step(slot)
        if not self.spec.exit_each:
            self._exits()
        for width, model in narrowed.items():
            self._whole_step(f"width {width}", model)
        if fetch:
            self.samples.add("fetch", timed(self.device, fetch))

    def _whole_step(self, key: str, model: BlockModel) -> None:
        """An ordinary training step of everything, by phases."""
        weights = [t.name for t in model.spec.weights]
        with elastic(model, weights, self.exits) as net:
            optimiser = optim.build(net.trained.values(), self.work)
            self._phases(net, optimiser)  # allocates gradients and the optimiser's state
            for phase, seconds in self._phases(net, optimiser).items():
                self.samples.add(f"{key} {phase}", seconds)
            smallest = optim.build([min(net.trained.values(), key=Tensor.numel)], self.work)
            smallest.step()
            self.samples.add(f"{key} fixed", timed(self.device, smallest.step))

    def _phases(self, net: Elastic, optimiser: torch.optim.Optimizer) -> dict[str, float]:
        moments = [stamp(self.device)]
        logits = net.logits(self.x)
        moments.append(stamp(self.device))
        gradients = _loss_gradients(logits, self.y)
        optimiser.zero_grad()
        moments.append(stamp(self.device))
        torch.autograd.backward(logits, gradients)
        moments.append(stamp(self.device))
        optimiser.step()
        moments.append(stamp(self.device))
        spans = map(seconds_between, moments, moments[1:])
        return dict(zip(("forward", "loss", "backward", "optimiser"), spans, strict=True))

    def _stamped_step(self, slot: int | str | None) -> None:
        """Forward block by block, backward node by node; gradients for the ``slot``-th tensor of each layer."""
        selected = [t.name for layer in self.layers for i, t in enumerate(layer.tensors) if slot in ("all", i)]
        modules = [layer.module for layer in self.layers]
        with elastic(self.model, selected, self.exits) as net, record_spans(modules) as spans:
            pieces = self._forward_pieces(net)
            gradient: Tensor | None = None
            for block, entrance, output in reversed(pieces):
                if gradient is None or self.spec.exit_each:
                    begin = stamp(self.device)
                    (gradient,) = _loss_gradients([output], self.y)
                    self.samples.add(f"loss {block}", seconds_between(begin, stamp(self.device)))
                for (index, own), seconds in timed_backward(output, gradient, spans, self.device).items():
                    self._add(slot, block, index, own, seconds)
                gradient = entrance.grad

    def _forward_pieces(self, net: Elastic) -> list[tuple[int, Tensor, Tensor]]:
        """(block, its entrance, its output) of every block, or of every exit on a frozen trunk."""
        pieces, h = [], self.x
        for block in range(1, self.spec.num_blocks + 1):
            frozen = self.spec.exit_each
            entrance, inside = _cut(h)
            with torch.no_grad() if frozen else nullcontext():
                begin = stamp(self.device)
                h = self.model.run(inside, block, block)
                self.samples.add(f"forward {block}", seconds_between(begin, stamp(self.device)))
            output = h
            if frozen and block in net.exits:
                entrance, inside = _cut(h)
                begin = stamp(self.device)
                output = self.model.exit(block, inside)
                self.samples.add(f"exit forward {block}", seconds_between(begin, stamp(self.device)))
            pieces.append((block, entrance, output))
        return pieces

    def _add(self, slot: int | str | None, block: int, index: int, own: bool, seconds: float) -> None:
        self.samples.add(f"{slot} {'own' if own else 'after'} {block} {index}", seconds)

    def _exits(self) -> None:
        """Forward and backward of every exit, on the activations it would see."""
        h = self.x
        for block in range(1, self.spec.num_blocks):
            with torch.no_grad():
                h = self.model.run(h, block, block)
            with elastic(self.model, (), (block,)):
                _, inside = _cut(h)
                begin = stamp(self.device)
                logits = self.model.exit(block, inside)
                self.samples.add(f"exit forward {block}", seconds_between(begin, stamp(self.device)))
                (gradient,) = _loss_gradients([logits], self.y)
                seconds = timed(self.device, partial(torch.autograd.backward, logits, gradient))
                self.samples.add(f"exit backward {block}", seconds)

    def result(self, device_name: str, widths: Iterable[float]) -> TimingProfile:
        through, updates = self._parts()
        executed = sum(through.values()) + sum(updates.values()) - through[self.spec.weights[0].name]
        calibration = self.samples.median("full backward") / executed if executed > 0 else 1.0
        forwards = [self.samples.median(f"forward {b}") for b in range(1, self.spec.num_blocks + 1)]
        heads = (
            sum(self.samples.median(f"exit forward {b}") for b in self.exits) if self.spec.exit_each else 0.0
        )
        stretch = self.samples.median("full forward") / (sum(forwards) + heads)
        fixed = self.samples.median("full fixed")
        moving = max(0.0, self.samples.median("full optimiser") - fixed)
        per_scalar = moving / sum(t.size for t in self.spec.weights)
        loss = 0.0 if self.spec.exit_each else self.samples.median("full loss")
        return TimingProfile(
            device=device_name,
            model=self.spec.name,
            batch_size=len(self.x),
            tensors=tuple(
                TensorTime(
                    t.name,
                    t.block,
                    through[t.name] * calibration,
                    updates[t.name] * calibration + per_scalar * t.size,
                )
                for t in self.spec.weights
            ),
            blocks=tuple(
                self._block(number, seconds * stretch, per_scalar) for number, seconds in enumerate(forwards, 1)
            ),
            widths=tuple(self._width(w) for w in sorted(widths)),
            overhead_seconds=loss + fixed + self.samples.median("fetch"),
            calibration=calibration,
        )

    def _parts(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of the way through, and of the update, of every tensor; each block's parts add up to it."""
        through = dict.fromkeys((t.name for t in self.spec.weights), 0.0)
        updates = dict(through)
        for key in self.samples.values:
            slot, kind, *rest = key.split()
            if slot == "None" and kind in ("own", "after"):
                block, index = map(int, rest)
                through[self._through_tensor(block, index, kind == "own")] += self.samples.median(key)
        for number, layer in enumerate(self.layers):
            for place, tensor in enumerate(layer.tensors):
                own = f"own {tensor.block} {number}"
                extra = self.samples.median(f"{place} {own}") - self.samples.median(f"None {own}")
                updates[tensor.name] = max(0.0, extra)
        for block in range(1, self.spec.num_blocks + 1):
            self._fit_block(block, updates)
        return through, updates

    def _fit_block(self, block: int, updates: dict[str, float]) -> None:
        """Tensors updated together may share work; scale so that all of them cost what they do together."""
        names = [t.name for t in self.spec.weights if t.block == block]
        apart = sum(updates[name] for name in names)
        together = self._total("all", block) - self._total("None", block)
        if apart > 0:
            for name in names:
                # Beyond this range it is noise of a block too small to measure.
                updates[name] *= min(1.5, max(0.5, together / apart))

    def _total(self, slot: str, block: int) -> float:
        kinds = (f"{slot} own {block} ", f"{slot} after {block} ")
        return sum(self.samples.median(key) for key in self.samples.values if key.startswith(kinds))

    def _through_tensor(self, block: int, index: int, own: bool) -> str:
        """What follows a layer is on the way to its last tensor; what leads a block, to the block before."""
        if index != BEFORE_ALL:
            layer = self.layers[index]
            return layer.carrier if own else layer.tensors[-1].name
        earlier = [t.name for t in self.spec.weights if t.block < block]
        return (
            earlier[-1] if earlier and not self.spec.exit_each else self.spec.weights_in(block, block)[0].name
        )

    def _block(self, number: int, forward: float, per_scalar: float) -> BlockTime:
        head = self.samples.median(f"exit forward {number}")
        if self.spec.exit_each:
            return BlockTime(forward, head, self.samples.median(f"loss {number}"))
        size = sum(
            t.size
            for t in self.spec.tensors
            if t.block == number and t.name.startswith("exits.") and t.role.value == "exit"
        )
        return BlockTime(forward, head, self.samples.median(f"exit backward {number}") + per_scalar * size)

    def _width(self, width: float) -> WidthTime:
        phase = {
            p: self.samples.median(f"width {width} {p}") for p in ("forward", "loss", "backward", "optimiser")
        }
        return WidthTime(width, phase["forward"] + phase["loss"], phase["backward"] + phase["optimiser"])


def _layers_with_weights(model: BlockModel) -> list[_Layer]:
    owned: dict[str, list[TensorSpec]] = {}
    for t in model.spec.weights:
        owned.setdefault(t.name.rpartition(".")[0], []).append(t)
    return [_Layer(model.get_submodule(name), tuple(tensors)) for name, tensors in owned.items()]


def _cut(h: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf that takes the gradient, and a copy to compute with that may be changed in place."""
    leaf = h.detach()
    if leaf.is_floating_point():
        leaf = leaf.requires_grad_()
        return leaf, leaf.clone()
    return leaf, leaf


def _loss_gradients(logits: Sequence[Tensor], y: Tensor) -> list[Tensor]:
    detached = [z.detach().requires_grad_() for z in logits]
    return list(torch.autograd.grad(objective(detached, y)[0], detached))
