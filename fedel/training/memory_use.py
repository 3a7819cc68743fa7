"""How many bytes each part of a training step takes: the second half of a profile.

What autograd keeps of a block is counted where autograd keeps it. What is in use for a moment only (gradients
on their way, a kernel's own space) is read off the allocator. Blocks are measured one by one, which takes no
more memory than training one of them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from fedel.models.blocks import BlockModel
from fedel.training.bench import cut
from fedel.training.clock import resident_bytes
from fedel.training.elastic import elastic
from fedel.training.objective import objective
from fedel.types import BlockBytes, LocalWork, MemoryUse

T = TypeVar("T")
_QUIET = {"KINETO_LOG_LEVEL": "99"}
"""Torch's profiler prints a line for every start and stop otherwise."""
_one_at_a_time = threading.Lock()
"""Torch has one profiler for the whole process, which crashes if two threads use it at the same time."""


def can_measure(device: torch.device) -> bool:
    """On a CPU the allocator is read through Kineto, which a build of torch may lack."""
    return device.type == "cuda" or torch.profiler.kineto_available()


def measure(model: BlockModel, x: Tensor, y: Tensor, work: LocalWork, device: torch.device) -> MemoryUse:
    """What training ``model`` takes with batches like ``x``. The model's values are the same afterwards."""
    model.to(device)
    h, y = x.to(device), y.to(device)
    blocks, kept = [], True  # the batch is counted as the batch
    for number in range(1, model.spec.num_blocks + 1):
        output, frozen = peak_of(partial(_frozen, model, h, number), device)
        activations, working, kept = _trained(model, h, number, kept, device)
        exit_bytes = _exit(model, output, y, number, device)
        blocks.append(BlockBytes(activations, working, frozen, output.nbytes, exit_bytes))
        h = output
    del h, output
    per_value = 2 if work.optimiser == "adamw" else int(work.momentum > 0)
    return MemoryUse(_base(device), x.nbytes + y.nbytes, per_value, tuple(blocks))


def _frozen(model: BlockModel, h: Tensor, block: int) -> Tensor:
    with torch.no_grad():
        return model.eval().run(h, block, block)


def _trained(
    model: BlockModel, h: Tensor, block: int, input_kept: bool, device: torch.device
) -> tuple[int, int, bool]:
    """Bytes that stay until the backward pass, bytes beyond these, and whether the output is among those kept.

    ``input_kept`` says that what enters is counted with the block before.
    """
    if model.spec.exit_each:
        return 0, peak_of(partial(_frozen, model, h, block), device)[1], True
    weights = [t.name for t in model.spec.weights if t.block == block]
    with elastic(model, weights, (model.spec.num_blocks,), block, track_statistics=False) as net:
        _leaf, inside = cut(h)
        own = {_place(p) for p in (*model.parameters(), *model.buffers())}
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            if _place(tensor) not in own:
                saved[_place(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        def work() -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                output = model.run(inside, block, block)
            if output.requires_grad:
                torch.autograd.backward(output, torch.ones_like(output))
            return output.detach()

        output, peak = peak_of(work, device)
        entrance = saved.pop(_place(inside), 0)
        activations = sum(saved.values())
        gradients = sum(p.grad.nbytes for p in net.trained.values() if p.grad is not None)
        working = max(0, peak - activations - gradients)
        return activations + (0 if input_kept else entrance), working, _place(output) in saved


def _exit(model: BlockModel, h: Tensor, y: Tensor, block: int, device: torch.device) -> int:
    """The loss included; of the last block it is only that."""
    heads = [t.name for t in model.spec.weights if t.block == block] if model.spec.exit_each else []
    with elastic(model, heads, (block,), block, track_statistics=False) as net:
        _, inside = cut(h)

        def work() -> None:
            loss, _ = objective([model.exit(block, inside)], y)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]

        peak = peak_of(work, device)[1]
        return max(0, peak - sum(p.grad.nbytes for p in net.trained.values() if p.grad is not None))


def peak_of(work: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What ``work`` returns, and the most that it had in use at once."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        return result, int(torch.cuda.max_memory_allocated(device)) - before
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    # torch.profiler does the same, and loads modules of 75 MB for it.
    with _one_at_a_time, torch.autograd.profiler.profile(profile_memory=True) as found:
        result = work()
    assert found.kineto_results is not None
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    in_use = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        in_use += event.nbytes()
        most = max(most, in_use)
    return result, most


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _base(device: torch.device) -> int:
    """In use besides: the program, its libraries, the data, the model. What was freed is given back first."""
    gc.collect()
    if device.type == "cpu":
        with suppress(AttributeError):  # where it is not glibc
            ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes(device)
