"""A run that this agent takes part in: everything built from the coordinator's offer."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedel import plugins
from fedel.errors import ConfigError, ModelError
from fedel.job import RunConfig
from fedel.strategies import build
from fedel.training.settings import Evaluator
from fedel.types import Strategy, Trainer
from fedel.v1 import coordinator_pb2
from fedel.wire.codec import profile_to_pb
from fedel_edge.config import AgentConfig
from fedel_edge.state import RunFolder

if TYPE_CHECKING:
    from fedel.v1.aggregator_pb2_grpc import AggregatorServiceAsyncStub


@dataclass(frozen=True)
class Shard:
    """An aggregator, and the tensors it keeps."""

    stub: AggregatorServiceAsyncStub
    tensors: Collection[str]
    """Empty means all."""


@dataclass
class Run:
    name: str
    identity: str
    config: RunConfig
    strategy: Strategy
    trainer: Trainer
    evaluator: Evaluator | None
    folder: RunFolder
    shards: tuple[Shard, ...] = ()
    """Told anew with every session: an aggregator may have moved."""

    def join(self, slowdown: float) -> coordinator_pb2.Join:
        profile = self.trainer.profile
        return coordinator_pb2.Join(
            run=self.name,
            model_digest=self.trainer.spec.digest,
            num_samples=self.trainer.num_samples,
            profile=profile_to_pb(profile.scaled(slowdown) if slowdown > 1 else profile),
            can_evaluate=self.evaluator is not None,
        )


def identity_of(offer: coordinator_pb2.RunOffer) -> str:
    """What must be the same for kept state to be of the same run."""
    return "\n".join((offer.instance, offer.model_digest, offer.config_json))


def prepare(offer: coordinator_pb2.RunOffer, config: AgentConfig) -> Run:
    """Build model, data and profile. Slow: it loads data and may measure."""
    run = RunConfig.parse(json.loads(offer.config_json), f"run '{offer.run}'")
    trainer, evaluator = plugins.load(run.trainer, "trainer", ConfigError)(run, config.trainer_settings)
    if trainer.spec.digest != offer.model_digest:
        raise ModelError(
            f"run '{offer.run}' trains a model with the digest {offer.model_digest}, but "
            f"'{trainer.spec.name}' as built here has {trainer.spec.digest}; install the version of FedEL and "
            "of the model's code that the run was created with"
        )
    identity = identity_of(offer)
    folder = RunFolder(config.state_dir, offer.run, identity)
    return Run(offer.run, identity, run, build(run.strategy), trainer, evaluator, folder)
