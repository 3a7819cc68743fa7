"""The words that every part of FedEL uses: models, windows, tasks, updates, timing profiles.

Plain frozen data, numpy and the standard library only. Two conventions hold everywhere:

* tensors and blocks are in forward order, input first, in every list;
* blocks are numbered as in the paper, 1 to B, so ``block_seconds[b - 1]`` belongs to block ``b``.

Import them from here, whichever file of this package they are written in.
"""

from fedel.types.method import Fold, Strategy
from fedel.types.model import Array, ModelSpec, Patch, Role, Tensors, TensorSpec, Where, Window
from fedel.types.task import (
    ClientView,
    Folded,
    LocalWork,
    Memory,
    Participant,
    Plan,
    Report,
    RoundContext,
    Task,
    Update,
)
from fedel.types.timing import FREE, BlockTime, StepCost, TensorTime, TimingProfile, WidthTime
from fedel.types.training import Hook, Trained, Trainer, Training, TrainSpec, Value

__all__ = [
    "FREE",
    "Array",
    "BlockTime",
    "ClientView",
    "Fold",
    "Folded",
    "Hook",
    "LocalWork",
    "Memory",
    "ModelSpec",
    "Participant",
    "Patch",
    "Plan",
    "Report",
    "Role",
    "RoundContext",
    "StepCost",
    "Strategy",
    "Task",
    "TensorSpec",
    "TensorTime",
    "Tensors",
    "TimingProfile",
    "TrainSpec",
    "Trained",
    "Trainer",
    "Training",
    "Update",
    "Value",
    "Where",
    "WidthTime",
    "Window",
]
