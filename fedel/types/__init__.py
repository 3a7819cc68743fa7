"""The words that every part of FedEL uses: models, windows, tasks, updates, timing profiles.

Plain frozen data, numpy and the standard library only. Two conventions hold everywhere:

* tensors and blocks are in forward order, input first, in every list;
* blocks are numbered as in the paper, 1 to B, so ``block_seconds[b - 1]`` belongs to block ``b``.

Import them from here, whichever file of this package they are written in.
"""

from fedel.types.method import Fold, Strategy
from fedel.types.model import Array, Change, ModelSpec, Patch, Role, Tensors, TensorSpec, Where, Window
from fedel.types.task import (
    CLOCK_PACE,
    COMPRESSIONS,
    OPTIMISERS,
    PACES,
    PLAIN,
    PLAN_PACE,
    ClientView,
    Folded,
    LocalWork,
    Memory,
    Participant,
    Plan,
    Report,
    RoundContext,
    SentUpdate,
    Task,
    Update,
    UploadSettings,
)
from fedel.types.timing import (
    AS_PROFILED,
    FREE,
    BlockBytes,
    BlockTime,
    MemoryUse,
    Speed,
    StepCost,
    TensorTime,
    TimingProfile,
    WidthTime,
)
from fedel.types.training import (
    MAX_STATISTICS_BATCHES,
    Hook,
    Pace,
    Trained,
    Trainer,
    Training,
    TrainSpec,
    Value,
)

__all__ = [
    "AS_PROFILED",
    "CLOCK_PACE",
    "COMPRESSIONS",
    "FREE",
    "MAX_STATISTICS_BATCHES",
    "OPTIMISERS",
    "PACES",
    "PLAIN",
    "PLAN_PACE",
    "Array",
    "BlockBytes",
    "BlockTime",
    "Change",
    "ClientView",
    "Fold",
    "Folded",
    "Hook",
    "LocalWork",
    "Memory",
    "MemoryUse",
    "ModelSpec",
    "Pace",
    "Participant",
    "Patch",
    "Plan",
    "Report",
    "Role",
    "RoundContext",
    "SentUpdate",
    "Speed",
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
    "UploadSettings",
    "Value",
    "Where",
    "WidthTime",
    "Window",
]
