"""What training takes: seconds and bytes of the parts of one step on one device, and the cost of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property


@dataclass(frozen=True, slots=True)
class TensorTime:
    """Backward seconds of one tensor in one training step."""

    name: str
    block: int
    grad_seconds: float
    """Gradient with respect to the input of the tensor's operation: paid to reach shallower tensors."""
    update_seconds: float
    """Gradient of the tensor itself and its optimiser step: paid when it is trained."""


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Forward seconds of one block, and the cost of the exit after it, in one training step."""

    forward_seconds: float
    exit_forward_seconds: float = 0.0
    exit_backward_seconds: float = 0.0
    frozen_forward_seconds: float = 0.0
    """Forward seconds below the window, without gradient and in evaluation mode; 0 where not measured."""


@dataclass(frozen=True, slots=True)
class WidthTime:
    """One training step of the model narrowed to a share ``width`` of its channels."""

    width: float
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Memory of one block in one training step."""

    activation_bytes: int
    """Kept for the backward pass when the block is trained or the gradient passes through it."""
    working_bytes: int
    """In use for a moment besides, forward or backward: gradients on their way, space that kernels need."""
    frozen_bytes: int
    """Most that is in use in its forward pass below the window, its output included."""
    output_bytes: int
    """What it hands to the next block."""
    exit_bytes: int = 0
    """Most that is in use in the exit after it: forward, loss and backward."""


NO_BYTES = BlockBytes(0, 0, 0, 0)


@dataclass(frozen=True)
class MemoryUse:
    """Memory of the parts of one training step. Weights and gradients follow from the model's spec."""

    base_bytes: int
    """In use before training begins: the program, the data, the model."""
    input_bytes: int
    """One batch."""
    optimiser_values: int
    """How many values the optimiser keeps for each value that it trains."""
    blocks: tuple[BlockBytes, ...]
    limit_bytes: int = 0
    """What the device may use in all; 0 is no limit."""

    def scaled(self, share: float) -> MemoryUse:
        """With batches of a share of the samples."""
        return self.extended(replace(self, input_bytes=0, blocks=(NO_BYTES,) * len(self.blocks)), share, 0.0)

    def extended(self, smaller: MemoryUse, share: float, smaller_share: float = 0.5) -> MemoryUse:
        """With batches of ``share`` times the samples, on the line through this and a measurement with fewer.

        >>> use = MemoryUse(9, 4, 1, (BlockBytes(6, 5, 0, 0),))
        >>> use.extended(MemoryUse(9, 2, 1, (BlockBytes(3, 3, 0, 0),)), share=2).blocks[0]
        BlockBytes(activation_bytes=12, working_bytes=9, frozen_bytes=0, output_bytes=0, exit_bytes=0)
        """

        def at(here: int, there: int) -> int:
            return math.ceil(here + (here - there) * (share - 1) / (1 - smaller_share))

        blocks = tuple(
            BlockBytes(*map(at, astuple(here), astuple(there)))
            for here, there in zip(self.blocks, smaller.blocks, strict=True)
        )
        return replace(self, input_bytes=at(self.input_bytes, smaller.input_bytes), blocks=blocks)


@dataclass(frozen=True)
class TimingProfile:
    """How long each part of one training step takes on one device (paper, section 4.1), and its memory."""

    device: str
    model: str
    batch_size: int
    tensors: tuple[TensorTime, ...]
    blocks: tuple[BlockTime, ...]
    widths: tuple[WidthTime, ...] = ()
    overhead_seconds: float = 0.0
    """Seconds of a step besides forward and backward: fetching the batch, the loss, bookkeeping."""
    calibration: float = 1.0
    """Measured whole backward over the sum of its measured parts; already applied to all seconds here."""
    source: str = "measured"
    memory: MemoryUse | None = None
    """None where it was not measured."""
    exit_sizes: tuple[int, ...] = ()
    """The model's, when it was measured; empty where they are not known. In files only, never sent."""

    @property
    def memory_limit_bytes(self) -> int:
        """What the device may use in all; 0 is no limit."""
        return self.memory.limit_bytes if self.memory else 0

    @cached_property
    def by_name(self) -> Mapping[str, TensorTime]:
        return {t.name: t for t in self.tensors}

    def scaled(self, slowness: float, device: str = "") -> TimingProfile:
        """The same work on a device ``slowness`` times slower.

        >>> fast = TimingProfile("orin", "toy", 4, (TensorTime("w", 1, 1.0, 2.0),), (BlockTime(3.0),))
        >>> fast.scaled(2).tensors[0].update_seconds
        4.0
        """
        s = slowness
        return replace(
            self,
            device=device or f"{self.device}/{s:g}",
            tensors=tuple(
                replace(t, grad_seconds=t.grad_seconds * s, update_seconds=t.update_seconds * s)
                for t in self.tensors
            ),
            blocks=tuple(
                BlockTime(
                    b.forward_seconds * s,
                    b.exit_forward_seconds * s,
                    b.exit_backward_seconds * s,
                    b.frozen_forward_seconds * s,
                )
                for b in self.blocks
            ),
            widths=tuple(
                WidthTime(w.width, w.forward_seconds * s, w.backward_seconds * s) for w in self.widths
            ),
            overhead_seconds=self.overhead_seconds * s,
        )


@dataclass(frozen=True)
class Speed:
    """What earlier rounds say about a client: how long it takes against its profile, and its link.

    Learned by the coordinator from measured seconds, and sent with every task, so that plan and selection use
    the same figures.
    """

    slowness: float = 1.0
    """How many times longer its training takes than its timing profile says."""
    probe_slowness: float = 1.0
    """The same of the importance probe."""
    down_rate: float = 0.0
    """Bytes per second that it downloads; 0 where that is not known: then downloads cost nothing."""
    up_rate: float = 0.0
    """Bytes per second that it uploads; 0 where that is not known."""
    other_seconds: float = 0.0
    """Seconds of a round besides transfers, probe and steps: load the model, choose, store the update."""
    wait_seconds: float = 0.0
    """Seconds of a round in which it waits for others."""

    def transfer_seconds(self, bytes_down: float, bytes_up: float) -> float:
        """Time on the link in one round.

        >>> Speed(down_rate=10.0, up_rate=5.0).transfer_seconds(bytes_down=20, bytes_up=10)
        4.0
        >>> Speed().transfer_seconds(20, 10)
        0.0
        """
        down = bytes_down / self.down_rate if self.down_rate else 0.0
        return down + (bytes_up / self.up_rate if self.up_rate else 0.0)


AS_PROFILED = Speed()
"""Nothing is known beyond the profile."""


@dataclass(frozen=True)
class StepCost:
    """Predicted seconds of one training step, by phase."""

    forward_seconds: float
    backward_seconds: float

    def scaled(self, slowness: float) -> StepCost:
        return StepCost(self.forward_seconds * slowness, self.backward_seconds * slowness)

    def total(self, scope: str) -> float:
        """Seconds that count against T_th in the given budget scope (``backward``, ``train`` or ``round``)."""
        return self.backward_seconds if scope == "backward" else self.forward_seconds + self.backward_seconds


FREE = StepCost(0.0, 0.0)
