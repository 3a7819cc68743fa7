"""How long training takes: the parts of one step on one device, and the cost of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class TensorTime:
    """Backward seconds of one tensor in one training step."""

    name: str
    block: int
    grad_seconds: float
    """Gradient with respect to the input of the tensor's operation: paid to reach shallower tensors."""
    update_seconds: float
    """Gradient of the tensor itself and its optimiser step: paid when it is trained."""


@dataclass(frozen=True)
class BlockTime:
    """Forward seconds of one block, and the cost of the exit after it, in one training step."""

    forward_seconds: float
    exit_forward_seconds: float = 0.0
    exit_backward_seconds: float = 0.0
    frozen_forward_seconds: float = 0.0
    """Forward seconds below the window, without gradient and in evaluation mode; 0 where not measured."""


@dataclass(frozen=True)
class WidthTime:
    """One training step of the model narrowed to a share ``width`` of its channels."""

    width: float
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class TimingProfile:
    """How long each part of one training step takes on one device (paper, section 4.1)."""

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
class StepCost:
    """Predicted seconds of one training step, by phase."""

    forward_seconds: float
    backward_seconds: float

    def total(self, scope: str) -> float:
        """Seconds that count against T_th in the given budget scope (``backward`` or ``train``)."""
        return self.backward_seconds if scope == "backward" else self.forward_seconds + self.backward_seconds


FREE = StepCost(0.0, 0.0)
