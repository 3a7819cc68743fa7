"""What a training step needs of a device's memory, and what fits it: the second budget besides T_th.

A step has in use, at its fullest moment: what is there before it begins; the model as it came; gradient and
optimiser state of every tensor that trains; and the larger of

* the forward pass of the frozen blocks, where each output is dropped for the next, and
* the activations from the shallowest selected tensor's block to the front, kept for the backward pass, with
  what one block uses for a moment. The backward pass drops those of the deeper blocks on its way.

All of that is a sum over what is selected except the activations, which depend on its shallowest block only,
as the way back does in ``selection``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedel.types import MemoryUse, ModelSpec, Role, TensorSpec, TimingProfile, Window

VALUE_BYTES = 4
"""Every tensor is float32."""
PROBE_VALUES = 4
"""The importance probe holds two gradients, the start and the trial step of every weight in the window."""


def step_bytes(spec: ModelSpec, use: MemoryUse, selected: Collection[str], window: Window) -> int:
    """Most that one step has in use, when it trains ``selected`` and the exits of ``window``."""
    chosen = [spec.by_name[name] for name in selected]
    exits = spec.exits_for(window.end, window.front)
    if spec.exit_each:  # on a frozen trunk an exit runs where it has something to train
        exits = tuple(b for b in exits if any(t.block == b for t in chosen)) or (max(exits),)
    first = min((t.block for t in chosen), default=window.front + 1)
    return _in_use(spec, use, chosen, exits, window.end, first, 1 + use.optimiser_values)


def probe_bytes(spec: ModelSpec, use: MemoryUse, window: Window) -> int:
    """Most that the importance probe of ``window`` has in use; no training inside it has more."""
    weights, exits = spec.weights_in(window.end, window.front), spec.exits_for(window.end, window.front)
    values = max(PROBE_VALUES, 1 + use.optimiser_values)
    return _in_use(spec, use, weights, exits, window.end, window.end, values)


def whole_bytes(spec: ModelSpec, use: MemoryUse) -> int:
    """Most that one step of the whole model has in use."""
    return step_bytes(spec, use, {t.name for t in spec.weights}, Window(1, spec.num_blocks))


def least_bytes(spec: ModelSpec, use: MemoryUse) -> int:
    """What the smallest step takes: the exit of the first block, or the block that is its own exit."""
    if spec.exit_each or spec.num_blocks == 1:
        return probe_bytes(spec, use, Window(1, 1))
    return step_bytes(spec, use, (), Window(1, 1))


def _in_use(
    spec: ModelSpec,
    use: MemoryUse,
    weights: Sequence[TensorSpec],
    exits: tuple[int, ...],
    end: int,
    first: int,
    values: int,
) -> int:
    """``values`` are held for each value that trains; ``first`` is the shallowest block with one of them."""
    heads = [t for t in spec.tensors if t.role is Role.EXIT and t.block in exits]
    trained = sum(t.size for t in (*weights, *heads)) * VALUE_BYTES
    model = sum(t.size for t in spec.tensors) * VALUE_BYTES
    batch = use.input_bytes if end == 1 else _entrance(use, end)
    moment = max(
        _frozen(use, max(exits)) + 2 * batch,  # the batch before is dropped once the next one is there
        _activations(spec, use, first, exits) + batch,
        trained,  # what is sent is copied at the end
    )
    return use.base_bytes + model + use.input_bytes + values * trained + moment


def _entrance(use: MemoryUse, block: int) -> int:
    """What enters a block."""
    return use.blocks[block - 2].output_bytes if block > 1 else 0


def _frozen(use: MemoryUse, front: int) -> int:
    """The fullest moment of a forward pass that keeps nothing."""
    return max(_entrance(use, b) + use.blocks[b - 1].frozen_bytes for b in range(1, front + 1))


def _activations(spec: ModelSpec, use: MemoryUse, first: int, exits: tuple[int, ...]) -> int:
    """The fullest moment of a step that keeps activations from block ``first`` on."""
    front = max(exits)
    if spec.exit_each:
        return _frozen(use, front) + sum(use.blocks[b - 1].exit_bytes for b in exits)
    kept = fullest = 0
    for block in use.blocks[first - 1 : front]:
        kept += block.activation_bytes
        fullest = max(fullest, kept + block.working_bytes)
    last = use.blocks[front - 1]
    return max(fullest, kept + last.output_bytes + last.exit_bytes)


def fits(spec: ModelSpec, profile: TimingProfile, window: Window, limit_bytes: int) -> bool:
    """Whether a window fits: its probe, and so whatever may be selected inside it.

    Without a limit, or where memory was not measured, every window does.
    """
    if not limit_bytes or profile.memory is None:
        return True
    return probe_bytes(spec, profile.memory, window) <= limit_bytes


def keep_within(
    spec: ModelSpec,
    profile: TimingProfile,
    selected: Collection[str],
    window: Window,
    importance: Mapping[str, float],
    limit_bytes: int,
) -> set[str]:
    """The part of a selection that fits ``limit_bytes``: for every shallowest block the tensors from there on,
    less those of the least importance for their bytes until the rest fits; the most important of these sets.

    What is left may be nothing: then the step trains the exit only, if it fits at all.
    """
    use = profile.memory
    if not limit_bytes or use is None:
        return set(selected)
    best: set[str] = set()
    for first in sorted({spec.by_name[name].block for name in selected}):
        tensors = [t for t in map(spec.by_name.__getitem__, selected) if t.block >= first]
        part = _drop_until_fits(spec, use, tensors, window, importance, limit_bytes)
        if _value(part, importance) > _value(best, importance):
            best = part
    return best


def part_of_front(
    spec: ModelSpec, profile: TimingProfile, front: int, importance: Mapping[str, float], limit_bytes: int
) -> set[str]:
    """What to train where not even the probe of the front block fits: as much of the block as does, by an
    importance that needs no probe. Nothing means the exit only; a block that is its own exit is trained."""
    weights = [t.name for t in spec.weights_in(front, front)]
    known = {name: importance.get(name, 0.0) for name in weights}
    known = known if any(known.values()) else dict.fromkeys(weights, 1.0)
    kept = keep_within(spec, profile, weights, Window(front, front), known, limit_bytes)
    own_head = front == spec.num_blocks or spec.exit_each
    return kept or ({*weights} if own_head else set())


def _drop_until_fits(
    spec: ModelSpec,
    use: MemoryUse,
    tensors: list[TensorSpec],
    window: Window,
    importance: Mapping[str, float],
    limit_bytes: int,
) -> set[str]:
    least_first = sorted(tensors, key=lambda t: (importance.get(t.name, 0.0) / t.size, t.name))
    part = {t.name for t in tensors}
    for t in least_first:
        if step_bytes(spec, use, part, window) <= limit_bytes:
            break
        part.discard(t.name)
    return part


def _value(names: Collection[str], importance: Mapping[str, float]) -> float:
    return sum(importance.get(name, 0.0) for name in sorted(names))
