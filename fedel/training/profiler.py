"""The tensor timing profiler: what each part of a training step costs on this device (paper, section 4.1).

A step in which no weight gets a gradient gives the way through (t_g); steps in which only the first,
the second, ... tensor of every layer does give the updates (t_w). What follows a layer without weights of
its own (activation, pooling, addition) is on the way to the layer's last tensor.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedel.core.memory_budget import whole_bytes
from fedel.job import RunConfig
from fedel.models.blocks import BlockModel
from fedel.training import memory_use
from fedel.training.bench import ALL, NONE, Bench, Part
from fedel.training.graph import BEFORE_ALL
from fedel.types import (
    Array,
    BlockTime,
    LocalWork,
    MemoryUse,
    ModelSpec,
    Role,
    TensorTime,
    TimingProfile,
    WidthTime,
)

FEW_SAMPLES = 32
"""Memory is measured with so many where there may not be enough for a whole batch."""
Progress = Callable[[int, int], None]
"""Called with the rounds of measurement done and to do."""


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
    limit_bytes: int = 0,
) -> TimingProfile:
    """Measure ``model`` on ``batch``, which stands for every batch of training.

    ``widths`` adds whole steps of the model narrowed to these shares; ``fetch`` makes one batch ready, and
    its time counts as overhead. With ``limit_bytes``, memory is measured on a few samples and drawn out to the
    batch; where a step of the whole model would not fit, a part of the batch is timed, and its seconds count in
    proportion. The model's values are the same afterwards.
    """
    device = torch.device(device)
    model.to(device)
    before = model.tensors()
    x, y = torch.from_numpy(batch[0]), torch.from_numpy(batch[1])
    use = _memory_use(model, x, y, work, device, limit_bytes) if memory_use.can_measure(device) else None
    timed = _samples_within(model.spec, use, len(x)) if use else len(x)
    bench = Bench(model, x[:timed], y[:timed], work, device)
    narrowed = {w: model.narrow(w)[0].to(device) for w in sorted(widths) if w < 1}
    try:
        for done in range(-1, rounds):
            if done == 0:
                bench.samples.values.clear()  # the first round only warmed up
            bench.measure(narrowed, fetch)
            if progress:
                progress(done + 1, rounds)
    finally:
        model.load(before)
    return replace(_of_whole_batch(bench, tuple(narrowed), len(x)), memory=use)


def _memory_use(
    model: BlockModel, x: Tensor, y: Tensor, work: LocalWork, device: torch.device, limit_bytes: int
) -> MemoryUse:
    few = len(x) if limit_bytes == 0 else min(len(x), FEW_SAMPLES)
    use = memory_use.measure(model, x[:few], y[:few], work, device)
    if few < len(x):
        half = memory_use.measure(model, x[: few // 2], y[: few // 2], work, device)
        use = use.extended(half, len(x) / few)
    return replace(use, limit_bytes=limit_bytes)


def _samples_within(spec: ModelSpec, use: MemoryUse, num_samples: int) -> int:
    """How many samples to time: all, or half as often as it takes for a step of the whole model to fit."""
    samples = num_samples
    # Twice, because a step that is taken apart holds a copy of what passes between blocks.
    while whole_bytes(spec, use.scaled(2 * samples / num_samples)) > use.limit_bytes > 0:
        if samples <= 2:
            break
        samples //= 2
    return samples


def _of_whole_batch(bench: Bench, widths: Sequence[float], batch_size: int) -> TimingProfile:
    found, ratio = _assemble(bench, widths), batch_size / len(bench.x)
    if ratio == 1:
        return found
    fetch = bench.samples.median("fetch")  # of the whole batch already
    found = found.scaled(ratio, found.device)
    overhead = found.overhead_seconds - fetch * (ratio - 1)
    return replace(found, batch_size=batch_size, overhead_seconds=overhead)


def cache_key(
    run: RunConfig,
    spec: ModelSpec,
    input_shape: Sequence[int],
    widths: Sequence[float],
    device: str | torch.device,
    num_threads: int,
    limit_bytes: int = 0,
) -> str:
    """Everything that a measurement depends on; a profile kept under the same key can be used again."""
    # How many samples there are changes nothing in the time of a step.
    options = {key: value for key, value in run.workload.data_options.items() if key != "num_train"}
    parts = (
        spec.digest,
        tuple(input_shape),
        run.work.batch_size,
        run.work.optimiser,
        run.workload.data,
        sorted(options.items()),
        tuple(widths),
        limit_bytes,
        default_device_name(torch.device(device)),
        num_threads,
        torch.__version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def default_device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.node() or 'cpu'} ({threads} CPU thread{'s' if threads > 1 else ''})"


def _assemble(bench: Bench, widths: Sequence[float]) -> TimingProfile:
    spec, median = bench.spec, bench.samples.median
    numbers = range(1, spec.num_blocks + 1)
    factors, calibration = _calibrate(bench)
    through, updates = _through(bench, factors), _updates(bench, factors)
    bare = median((1.0, "bare optimiser"))
    per_scalar = max(0.0, median((1.0, "optimiser")) - bare) / sum(t.size for t in spec.weights)
    # Where every exit has a loss of its own, it is counted there.
    loss = 0.0 if spec.exit_each else median((1.0, "loss"))
    return TimingProfile(
        device=default_device_name(bench.device),
        model=spec.name,
        batch_size=len(bench.x),
        tensors=tuple(
            TensorTime(t.name, t.block, through[t.name], updates[t.name] + per_scalar * t.size)
            for t in spec.weights
        ),
        blocks=tuple(_block(bench, number, per_scalar) for number in numbers),
        widths=tuple(_width(bench, width) for width in widths),
        overhead_seconds=loss + bare + median("fetch"),
        calibration=calibration,
        exit_sizes=spec.exit_sizes,
    )


def _calibrate(bench: Bench) -> tuple[list[float], float]:
    """For each block and for all of them: backward in an ordinary step over the sum of its stamped parts.

    A frozen trunk has no backward, so its exits cannot be distinguished there: they share one factor.
    """
    numbers = range(1, bench.spec.num_blocks + 1)
    whole = [bench.samples.median((1.0, "backward", b)) for b in numbers]
    parts = [_of_block(bench, ALL, b) for b in numbers]
    # An ordinary step does not compute the gradient of the network's input.
    parts[0] -= bench.samples.median(Part(NONE, 1, 0, True))
    common = sum(whole) / sum(parts) if sum(parts) > 0 else 1.0
    if bench.spec.exit_each:
        return [common] * len(whole), common
    return [w / p if p > 0 else common for w, p in zip(whole, parts, strict=True)], common


def _through(bench: Bench, factors: Sequence[float]) -> dict[str, float]:
    """Seconds of the way through every tensor's operation."""
    through = dict.fromkeys((t.name for t in bench.spec.weights), 0.0)
    for part, seconds in bench.samples.parts(NONE).items():
        through[_tensor_on_the_way(bench, part)] += seconds * factors[part.block - 1]
    return through


def _tensor_on_the_way(bench: Bench, part: Part) -> str:
    if part.layer != BEFORE_ALL:
        layer = bench.layers[part.layer]
        return layer.carrier if part.own else layer.tensors[-1].name
    # What leads a block follows the block before it.
    earlier = [t.name for t in bench.spec.weights if t.block < part.block]
    if earlier and not bench.spec.exit_each:
        return earlier[-1]
    return next(t.name for t in bench.spec.weights if t.block >= part.block)


def _updates(bench: Bench, factors: Sequence[float]) -> dict[str, float]:
    """Seconds that each tensor's own gradient adds; those of a block add up to what they cost together."""
    updates, median = {}, bench.samples.median
    for number, layer in enumerate(bench.layers):
        for place, t in enumerate(layer.tensors):
            own = median(Part(place, t.block, number, True)) - median(Part(NONE, t.block, number, True))
            updates[t.name] = max(0.0, own)
    for block, factor in enumerate(factors, start=1):
        names = [t.name for t in bench.spec.weights if t.block == block]
        apart = sum(updates[name] for name in names)
        together = _of_block(bench, ALL, block) - _of_block(bench, NONE, block)
        for name in names if apart > 0 else ():
            # Beyond this range it is noise of a block too small to measure.
            updates[name] *= factor * min(1.5, max(0.5, together / apart))
    return updates


def _of_block(bench: Bench, asked: str, block: int) -> float:
    return sum(seconds for part, seconds in bench.samples.parts(asked).items() if part.block == block)


def _block(bench: Bench, number: int, per_scalar: float) -> BlockTime:
    spec, median = bench.spec, bench.samples.median
    forward, head = median((1.0, "forward", number)), median((1.0, "exit forward", number))
    frozen = median(("frozen forward", number))
    if spec.exit_each:
        return BlockTime(forward, head, median(("loss", number)), frozen)
    if number == spec.num_blocks:
        return BlockTime(forward, frozen_forward_seconds=frozen)
    size = sum(t.size for t in spec.tensors if t.block == number and t.role is Role.EXIT)
    return BlockTime(forward, head, median(("exit backward", number)) + per_scalar * size, frozen)


def _width(bench: Bench, width: float) -> WidthTime:
    median, numbers = bench.samples.median, range(1, bench.spec.num_blocks + 1)
    forward = sum(median((width, phase, b)) for phase in ("forward", "exit forward") for b in numbers)
    backward = sum(median((width, "backward", b)) for b in numbers)
    return WidthTime(width, forward + median((width, "loss")), backward + median((width, "optimiser")))
