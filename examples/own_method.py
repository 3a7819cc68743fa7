"""A method of your own in one file: FedAvg with smoothed labels on the clients and momentum on the server."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedel.strategies import FedAvg
from fedel.strategies.base import HookedTrainer, MeanFold
from fedel.types import Folded, Hook, Role


@dataclass(frozen=True)
class Smoothing(Hook):
    """Own loss: a share of it pulls towards all classes equally. Runs on devices, on torch's tensors."""

    share: float

    def loss(self, training, loss, logits, targets):  # noqa: ARG002
        evenly = sum(-z.log_softmax(-1).mean() for z in logits)
        return (1 - self.share) * loss + self.share * evenly


@dataclass(frozen=True)
class ServerMomentum(FedAvg):
    """Who trains (``plan``) is FedAvg's; the fields are the keys of ``[strategy]``."""

    name: ClassVar[str] = "server-momentum"
    smoothing: float = 0.1
    momentum: float = 0.5

    def fit(self, task, model, memory, trainer):
        return super().fit(task, model, memory, HookedTrainer(trainer, Smoothing(self.smoothing)))

    def fold(self, spec):
        return MomentumFold(spec, self.weighting, self.momentum)


class MomentumFold(MeanFold):
    """Own fold: the step from the old model to the mean goes on from round to round. Runs on the aggregator."""

    def __init__(self, spec, weighting, momentum):
        super().__init__(spec, weighting)
        self.momentum = momentum
        self.trained = {t.name for t in spec.tensors if t.role is not Role.BUFFER}

    def finish(self, model, state):  # the model, or some of its tensors at a time
        new, state = dict(super().finish(model, state).model), dict(state)
        for name in self.trained & model.keys():
            speed = self.momentum * state.get(f"speed/{name}", np.float32(0)) + (new[name] - model[name])
            state[f"speed/{name}"], new[name] = speed, model[name] + speed
        return Folded(new, state)
