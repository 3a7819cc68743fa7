"""A run that this agent takes part in: everything that is built from the coordinator's offer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedel import plugins
from fedel.errors import ConfigError, ModelError
from fedel.job import RunConfig
from fedel.job_code import JobCode
from fedel.serialisation import parse_json
from fedel.strategies import build
from fedel.training.settings import Evaluator, HeldOut, TrainerSettings
from fedel.types import Strategy, Trainer
from fedel.v1 import coordinator_pb2
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.wire.channel import Dialer
from fedel.wire.codec import profile_to_pb
from fedel_edge import disk, gate
from fedel_edge.config import AgentConfig
from fedel_edge.drift import Drift
from fedel_edge.run_folder import RunFolder

if TYPE_CHECKING:
    from fedel.v1.aggregator_pb2_grpc import AggregatorServiceAsyncStub


@dataclass(frozen=True)
class Shard:
    """An aggregator and the tensors it keeps."""

    address: str
    tensors: Collection[str]
    """Empty means all."""

    def stub(self, dialer: Dialer) -> AggregatorServiceAsyncStub:
        return AggregatorServiceStub(dialer.channel(self.address))


@dataclass(eq=False)
class JoinedRun:
    name: str
    identity: str
    config: RunConfig
    strategy: Strategy
    trainer: Trainer
    evaluator: Evaluator | None
    folder: RunFolder
    held_out: HeldOut | None = None
    shards: tuple[Shard, ...] = ()
    """Replaced in every session, because an aggregator may have moved; transfers look it up at each attempt."""
    drift: Drift = field(default_factory=Drift)
    store_seconds: float = 0.0
    """How long it took to pack and store the last update: T_th has to pay for that too."""
    tests_beside_training: bool = False
    """Whether models are tested while this device trains."""
    beside: dict[bool, Evaluator] = field(default_factory=dict)
    """Those that do so, once they were needed, with a model of their own; by whether it is on own data."""
    using_code: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context in which the run's names are found: in this device's code, and in what came with the job."""
    downloading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a download: a training and a test of one version do not fetch it twice."""
    is_asked_to_measure: bool = False
    """An operator wants its timing profile measured again."""
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    def use_shards(self, shards: tuple[Shard, ...]) -> None:
        self.shards = shards
        self._moved.set()
        self._moved = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        """Wait before a transfer is tried again; less if there are new addresses to try."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._moved.wait(), seconds)

    def test_of(self, own: bool) -> Evaluator | None:
        """What tests models: on the data set's test data, or on samples that this client holds out."""
        return (self.held_out.test if self.held_out else None) if own else self.evaluator

    def make_beside(self, own: bool) -> Evaluator:
        """In the worker's thread: to build a model draws random numbers, as training does."""
        if own not in self.beside:
            with self.using_code():
                self.beside[own] = self.test_of(own).beside_training()  # type: ignore[union-attr]
        return self.beside[own]

    def join(self, slowdown: float) -> coordinator_pb2.Join:
        profile = self.trainer.profile
        return coordinator_pb2.Join(
            run=self.name,
            model_digest=self.trainer.spec.digest,
            num_samples=self.trainer.num_samples,
            profile=profile_to_pb(profile.scaled(slowdown) if slowdown > 1 else profile),
            can_evaluate=self.evaluator is not None,
            num_held_out=self.held_out.num_samples if self.held_out else 0,
        )


def identity_of(offer: coordinator_pb2.RunOffer) -> str:
    """What is the same in two offers of one run; state that was kept under another identity is of no use."""
    return "\n".join((offer.instance, offer.model_digest, offer.config_json))


def prepare(
    offer: coordinator_pb2.RunOffer,
    config: AgentConfig,
    in_use: Collection[str] = (),
    code: JobCode | None = None,
) -> JoinedRun:
    """Build model, data and profile, from code that this device allows. Slow: it loads data and may measure.

    ``in_use`` are the names of the other runs that this agent takes part in; ``code`` came with the job.
    """
    using_code = partial(plugins.only, config.code, code)
    run = RunConfig.parse(_parsed(offer), f"run '{offer.run}'")
    if wrong := gate.objection_to_job(run):
        raise ConfigError(f"run '{offer.run}': {wrong}")
    with using_code():
        make = plugins.load(run.trainer, "trainer", ConfigError)
        strategy = build(run.strategy)
        trainer, evaluator, *more = make(run, _settings(run, config))
    held_out: HeldOut | None = more[0] if more else None
    if trainer.spec.digest != offer.model_digest:
        raise ModelError(
            f"run '{offer.run}' trains a model with the digest {offer.model_digest}, but "
            f"'{trainer.spec.name}' as built here has {trainer.spec.digest}; install the versions of FedEL and "
            "of the model's code that the run was created with"
        )
    disk.forget_profiles(config.state_dir / "profiles")
    disk.make_room(config.state_dir, offer.run, trainer.spec, in_use, config.limits)
    identity = identity_of(offer)
    folder = RunFolder(config.state_dir, offer.run, identity)
    tests = [test for test in (evaluator, held_out.test if held_out else None) if test is not None]
    beside = config.evaluate_beside_training and all(hasattr(test, "beside_training") for test in tests)
    return JoinedRun(
        offer.run,
        identity,
        run,
        strategy,
        trainer,
        evaluator,
        folder,
        held_out,
        tests_beside_training=beside,
        using_code=using_code,
    )


def _settings(run: RunConfig, config: AgentConfig) -> TrainerSettings:
    """This device's own, with its part of the data where the job hands out parts."""
    split, settings = run.split, config.trainer_settings
    if not split.clients:
        return settings
    if config.client not in split.clients:
        raise ConfigError(
            f"[split] of the job has no part for '{config.client}': add its name to `clients` there"
        )
    how = {key: getattr(split, key) for key in ("method", "alpha", "balance", "min_size", "seed")}
    index, of = split.clients.index(config.client), len(split.clients)
    return replace(settings, data=replace(settings.data, index=index, of=of, **how))


def _parsed(offer: coordinator_pb2.RunOffer) -> Any:
    try:
        return parse_json(offer.config_json)
    except ValueError as error:
        raise ConfigError(f"run '{offer.run}': its configuration cannot be read: {error}") from None
