"""Clients of FedEL's own servers, many in one process: real agents, except that they keep nothing.

    python -m fedel.bench.clients ADDRESS FOLDER FIRST NUMBER OF [CERTS]

A real agent keeps the model and its update on its disk; two hundred of them would need more memory and disk
than one machine has. These drop what they download and share what they send. Servers see no difference.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TypeVar

from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig
from fedel_edge.joined_runs import JoinedRun, Shard
from fedel_edge.tasks import TaskRun, TaskRunner
from fedel_edge.transfer import retry_until_answered
from fedel_services.runtime import wait_for_stop_signal

from fedel.bench.trainer import trained_values
from fedel.plugins import Allowed
from fedel.roles.edge import recall, run_task
from fedel.security.tls import Tls
from fedel.strategies.base import needed_by
from fedel.training.settings import DataPart
from fedel.types import SentUpdate
from fedel.v1 import coordinator_pb2, task_pb2
from fedel.wire.channel import Dialer
from fedel.wire.codec import memory_from_pb, report_to_pb, task_from_pb
from fedel.wire.fan_out import fan_out
from fedel.wire.payload import Payload, pack
from fedel.wire.streams import Fetched, Pushed, fetch_model, push_update

T = TypeVar("T")
_ONE_FIT = threading.Lock()
"""The clients of a process fit one after the other: each needs a few times the memory of the model."""


@dataclass(frozen=True)
class LightRunner(TaskRunner):
    """Carries out a task as ``TaskRunner`` does, without a copy of the model and an outbox."""

    held: dict[str, int] = field(default_factory=dict)
    """The version of each tensor that a real agent would have."""

    async def _train(self, task_run: TaskRun, task: task_pb2.Task, dialer: Dialer) -> coordinator_pb2.TaskDone:
        run, phases = task_run.run, coordinator_pb2.PhaseSeconds()
        spec = run.trainer.spec
        mine = task_from_pb(task, spec, run.config.upload)
        memory = recall(task.accepted_round, memory_from_pb(task.memory), run.folder.memories)
        needed = needed_by(run.strategy, mine, memory, run.trainer)
        names = [t.name for t in spec.tensors if needed is None or t.name in needed]
        wanted = {n: self.held.get(n, -1) for n in names if self.held.get(n) != task.model_version}
        begin, num_bytes = time.monotonic(), 0
        if wanted:
            parts = await fan_out(
                _fetch(run, dialer, shard, task.model_version, wanted) for shard in run.shards
            )
            num_bytes = sum(part.num_bytes for part in parts)
            self.held.update(dict.fromkeys(names, task.model_version))
        phases.download = time.monotonic() - begin

        def fit() -> tuple[SentUpdate, list[Payload]]:
            with _ONE_FIT:
                model = trained_values(spec.name.removeprefix("vgg16-"))
                update = run_task(run.strategy, mine, memory, model, run.trainer, run.folder.memories)
                return update, [pack(_on(shard, update.patches)) for shard in run.shards]

        update, payloads = await self.worker.run(fit)
        begin = time.monotonic()
        pushed = await fan_out(
            _push(run, dialer, shard, update, payload)
            for shard, payload in zip(run.shards, payloads, strict=True)
        )
        phases.upload = time.monotonic() - begin
        return coordinator_pb2.TaskDone(
            run=run.name,
            report=report_to_pb(update.report),
            phases=phases,
            bytes_up=sum(part.num_bytes for part in pushed),
            bytes_down=num_bytes,
        )


def _on(shard: Shard, tensors: Mapping[str, T]) -> dict[str, T]:
    """Those that are on this shard; the only one names none, and has all."""
    return {name: it for name, it in tensors.items() if not shard.tensors or name in shard.tensors}


async def _fetch(
    run: JoinedRun, dialer: Dialer, shard: Shard, version: int, wanted: Mapping[str, int]
) -> Fetched:
    held = _on(shard, wanted)
    if not held:
        return Fetched(version, {}, 0)
    get = partial(fetch_model, shard.stub(dialer), run.name, version, spec=run.trainer.spec, held=held)
    return await retry_until_answered(run, "download", get)


async def _push(run: JoinedRun, dialer: Dialer, shard: Shard, update: SentUpdate, payload: Payload) -> Pushed:
    put = partial(push_update, shard.stub(dialer), run.name, update.report, payload, Pushed())
    return await retry_until_answered(run, "upload", put)


class LightAgent(Agent):
    def __init__(self, config: AgentConfig) -> None:
        super().__init__(config)
        real = self._runner
        self._runner = LightRunner(**{f.name: getattr(real, f.name) for f in fields(real)})


def config_of(address: str, folder: Path, index: int, of: int, certs: str = "") -> AgentConfig:
    name = f"client-{index}"
    return AgentConfig(
        address,
        name,
        folder / name,
        data=DataPart(index, of),
        evaluate=False,
        code=Allowed(("fedel.bench",)),
        tls=Tls(dir=f"{certs}/{name}" if certs else ""),
        log_level="WARNING",
    )


async def play(address: str, folder: Path, first: int, number: int, of: int, certs: str) -> None:
    """Run some of the clients until this process is stopped."""
    agents = [LightAgent(config_of(address, folder, i, of, certs)) for i in range(first, first + number)]
    running = [asyncio.ensure_future(agent.run()) for agent in agents]
    await wait_for_stop_signal()
    for agent in agents:
        agent.stop()
    await asyncio.gather(*running)


if __name__ == "__main__":
    _address, _folder, _first, _number, _of, *_certs = sys.argv[1:]
    asyncio.run(play(_address, Path(_folder), int(_first), int(_number), int(_of), "".join(_certs)))
