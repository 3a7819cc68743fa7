"""Valid things to begin with: a small model, updates with every kind of patch, tasks, reports, profiles."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from functools import cache, lru_cache

import numpy as np

from fedel import testing
from fedel.bundle import Bundle
from fedel.security.signed_keys import Proof
from fedel.types import LocalWork, Memory, Patch, Report, StepCost, Task, Update, WidthTime, Window
from fedel.v1 import aggregator_pb2 as agg
from fedel.v1 import coordinator_pb2 as coord
from fedel.v1 import task_pb2
from fedel.v1.model_pb2 import Chunk
from fedel.wire import code
from fedel.wire.codec import profile_to_pb, report_to_pb, spec_to_pb, task_to_pb
from fedel.wire.payload import pack
from fedel.wire.protocol import PROTOCOL
from fedel.wire.streams import model_header

RUN = "night-1"
PLANNED = "planned"
CODE = code.stored(Bundle({"own.py": "def net():\n    pass\n"}).text, Proof(b"no certificate", b"no signature"))
"""A run whose open round takes the updates of all clients that speak in the cases."""
SPEC = testing.spec()
STRATEGY = {"name": "fedavg", "weighting": "samples"}
CLIENTS = ("client-0", "client-1", "client-2")


@cache
def update(client: str = CLIENTS[0], round_num: int = 0) -> Update:
    """Whole tensors, a prefix, a grid of rows and columns, and a bitmap."""
    rng = np.random.default_rng([round_num, *client.encode()])
    patches: dict[str, Patch] = {}
    for number, tensor in enumerate(SPEC.tensors):
        values = rng.normal(0, 0.1, tensor.shape).astype(np.float32)
        match number % 4:
            case 0:
                patches[tensor.name] = Patch(values)
            case 1:
                part = tuple(slice(0, math.ceil(size / 2)) for size in tensor.shape)
                patches[tensor.name] = Patch(values[part], part)
            case 2:
                grid = np.ix_(*(np.arange(0, size, 2) for size in tensor.shape))
                patches[tensor.name] = Patch(values[grid], grid)
            case _:
                mask = rng.random(tensor.shape) < 0.5
                patches[tensor.name] = Patch(values[mask], mask)
    return Update(patches, report(client, round_num))


def report(client: str = CLIENTS[0], round_num: int = 0) -> Report:
    return Report(
        client=client,
        round_num=round_num,
        num_samples=40,
        num_steps=7,
        effective_steps=6.5,
        loss=0.75,
        loss_square=0.6,
        update_norm=1.5,
        cost=StepCost(0.2, 0.3),
        probe=StepCost(0.1, 0.1),
        train_seconds=2.5,
        peak_memory_bytes=1_000_000,
        window=Window(1, 3),
        resets=1,
        rounds_held=2,
        selected=tuple(t.name for t in SPEC.weights[:3]),
    )


def task() -> Task:
    importance = {t.name: 0.1 for t in SPEC.tensors}
    return Task(1, CLIENTS[0], 0.4, LocalWork(), 12345, {"width": 0.5}, importance)


def task_message() -> task_pb2.Task:
    memory = Memory(Window(1, 2), ("blocks.stem.conv.weight",), 1, 1)
    return task_to_pb(task(), RUN, SPEC, 1, 0, memory, 60.0)


def profile_message() -> task_pb2.TimingProfile:
    message = profile_to_pb(testing.profile())
    message.widths.append(task_pb2.WidthTime(width=0.5, forward_seconds=0.1, backward_seconds=0.2))
    return message


WIDTHS = (WidthTime(0.5, 0.1, 0.2), WidthTime(1.0, 0.2, 0.4))


def update_header(client: str = CLIENTS[0], round_num: int = 0) -> agg.UpdateHeader:
    made = update(client, round_num)
    payload = pack(made.patches)
    return agg.UpdateHeader(
        run=RUN, report=report_to_pb(made.report), tensors=payload.manifest, digest=payload.digest
    )


def update_payload(client: str = CLIENTS[0], round_num: int = 0) -> bytes:
    return b"".join(pack(update(client, round_num).patches).buffers)


@lru_cache(maxsize=20)
def whole_update(client: str = CLIENTS[0], round_num: int = 0) -> Update:
    """What every method can fold: whole tensors."""
    rng = np.random.default_rng([round_num, 7, *client.encode()])
    patches = {t.name: Patch(rng.normal(0, 0.1, t.shape).astype(np.float32)) for t in SPEC.tensors}
    return Update(patches, report(client, round_num))


def first_model() -> agg.ModelHeader:
    header = model_header(RUN, STRATEGY, SPEC)
    header.tensors.extend(pack({n: Patch(v) for n, v in testing.initial_model().items()}).manifest)
    return header


def model_payload() -> bytes:
    return b"".join(values.tobytes() for values in testing.initial_model().values())


def upload_messages() -> list[agg.PutUpdateRequest]:
    chunk = Chunk(offset=300, data=update_payload()[300:900])
    return [agg.PutUpdateRequest(header=update_header()), agg.PutUpdateRequest(chunk=chunk)]


def download_messages() -> list[agg.GetModelResponse]:
    payload = model_payload()
    content = agg.ModelContent(version=3, tensors=first_model().tensors)
    chunks = [Chunk(offset=at, data=payload[at : at + 500]) for at in range(0, len(payload), 500)]
    return [agg.GetModelResponse(content=content), *(agg.GetModelResponse(chunk=chunk) for chunk in chunks)]


def job(num_rounds: int = 3) -> dict[str, object]:
    return {
        "seed": 1,
        "strategy": {"name": "fedel"},
        "workload": {"model": "fake", "data": "fake"},
        "rounds": {"num_rounds": num_rounds, "min_clients": 3},
        "work": {"num_steps": 4, "batch_size": 8},
    }


def create_run(run: str = RUN) -> coord.CreateRunRequest:
    return coord.CreateRunRequest(run=run, config_json=json.dumps(job()), spec=spec_to_pb(SPEC))


def open_round(run: str, clients: Collection[str]) -> agg.OpenRoundRequest:
    """Updates like those of this module count in round 0."""
    allowed = [
        agg.Participant(client=client, num_samples=40, max_steps=100, max_effective_steps=100.0)
        for client in clients
    ]
    return agg.OpenRoundRequest(run=run, round_num=0, participants=allowed)


def session_messages(client: str = CLIENTS[0], run: str = RUN) -> list[coord.SessionRequest]:
    """One of each kind, in the order of a round."""
    key = {"run": run, "round_num": 0}
    return [
        coord.SessionRequest(
            hello=coord.Hello(
                client=client,
                device=coord.DeviceFacts(device_type="fake", memory_bytes=2**33, agent_version="1.0"),
                protocol=PROTOCOL,
                labels={"gpu": "orin"},
            )
        ),
        coord.SessionRequest(
            join=coord.Join(
                run=run, model_digest=SPEC.digest, num_samples=40, profile=profile_message(), can_evaluate=True
            )
        ),
        coord.SessionRequest(heartbeat=coord.Heartbeat()),
        coord.SessionRequest(answer=coord.TaskAnswer(**key, accepted=True)),
        coord.SessionRequest(progress=coord.TaskProgress(**key)),
        coord.SessionRequest(
            done=coord.TaskDone(
                run=run,
                report=report_to_pb(report(client)),
                phases=coord.PhaseSeconds(download=0.5, train=2.0, upload=1.0, wait=0.1),
                bytes_up=1_000,
                bytes_down=2_000,
            )
        ),
        coord.SessionRequest(failed=coord.TaskFailed(**key, message="out of memory")),
        coord.SessionRequest(
            evaluation=coord.EvaluationDone(
                run=run, model_version=1, accuracy=0.5, loss=1.0, num_samples=10, seconds=0.25
            )
        ),
    ]
