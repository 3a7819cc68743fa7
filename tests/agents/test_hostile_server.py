"""A coordinator or an aggregator that is broken, or means harm: the agent says no and goes on."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from fedel_edge.transfer import retry_until_answered
from grpc import aio

from fedel.job import RunConfig
from fedel.plugins import Allowed
from fedel.v1 import aggregator_pb2, coordinator_pb2
from fedel.wire.protocol import PROTOCOL
from fedel.wire.streams import REASON
from tests.agents import trainers
from tests.agents.stand_ins import RUN, SPEC, Aggregator, Federation, run_scenario, run_table, running, task_of

Code = grpc.StatusCode


def job(**changes: Any) -> str:
    return json.dumps(RunConfig.parse(changes).table())


@pytest.mark.parametrize("place", ["data", "model", "trainer", "strategy"])
def test_a_job_cannot_run_any_command(tmp_path: Path, place: str) -> None:
    mark = tmp_path / "was-here"
    options = {"args": ["touch", str(mark)]}
    tables: dict[str, dict[str, Any]] = {
        "data": {"workload": {"data": "subprocess:run", "data_options": options}},
        "model": {"workload": {"data": "digits", "model": "subprocess:run", "model_options": options}},
        "trainer": {"trainer": "subprocess:run"},
        "strategy": {"strategy": {"name": "subprocess:Popen"}, "trainer": "tests.agents.trainers:fake"},
    }

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent(code=Allowed(("tests.agents.trainers:fake",)))):
            await fed.coordinator.until("hello")
            fed.offer(job(**tables[place]))
            message = (await fed.coordinator.until("failed")).message
            assert "does not allow jobs to run code of 'subprocess'" in message
            assert "`allow` in the section [code]" in message
            await fed.joined()

    run_scenario(tmp_path / "state", scenario)
    assert not mark.exists()


def shape(*axes: int) -> Callable[[aggregator_pb2.ModelContent], None]:
    def change(content: aggregator_pb2.ModelContent) -> None:
        content.tensors[0].shape[:] = axes
        content.tensors[0].num_bytes = 4 * math.prod(axes) % 2**63

    return change


def twice(content: aggregator_pb2.ModelContent) -> None:
    content.tensors.append(content.tensors[0])


def renamed(content: aggregator_pb2.ModelContent) -> None:
    content.tensors[0].name = "../../etc/passwd"


def another_version(content: aggregator_pb2.ModelContent) -> None:
    content.version = 7


def too_short(content: aggregator_pb2.ModelContent) -> None:
    content.tensors[0].num_bytes = 1


def other_dtype(content: aggregator_pb2.ModelContent) -> None:
    content.tensors[0].dtype = 9  # type: ignore[assignment]


def masked(content: aggregator_pb2.ModelContent) -> None:
    content.tensors[0].where.bitmap = True


@pytest.mark.parametrize(
    "announce",
    [
        shape(2**40),
        shape(-1),
        shape(*[2**31] * 100),
        twice,
        renamed,
        another_version,
        too_short,
        other_dtype,
        masked,
    ],
)
def test_only_the_model_is_downloaded(tmp_path: Path, announce: Any) -> None:
    async def scenario(fed: Federation) -> None:
        fed.aggregator.announce = announce
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            failed = await fed.coordinator.until("failed")
            assert "what the aggregator announces is not the model" in failed.message
            assert len(failed.message) <= 1003
            fed.aggregator.announce = lambda _: None
            fed.order(1)
            await fed.done(1)

    run_scenario(tmp_path, scenario)


def test_a_shard_sends_only_its_own_tensors(tmp_path: Path) -> None:
    deep = frozenset(t.name for t in SPEC.tensors if t.block == SPEC.num_blocks)
    shards = [Aggregator(deep), Aggregator(frozenset(SPEC.by_name) - deep)]

    def with_another(content: aggregator_pb2.ModelContent) -> None:
        content.tensors.add().CopyFrom(content.tensors[0])
        content.tensors[-1].name = min(deep)

    async def scenario(fed: Federation) -> None:
        shards[1].announce = with_another
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            assert "was not asked for" in (await fed.coordinator.until("failed")).message

    run_scenario(tmp_path, scenario, aggregators=shards)


def test_bad_tasks_are_declined(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The gate's own tests have more of them."""

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined()
            for number, (field, value) in enumerate(
                [("num_steps", 2**31 - 1), ("num_epochs", -1), ("batch_size", 2**31 - 1), ("lr", math.nan)], 1
            ):
                bad = task_of(0)
                setattr(bad.work, field, value)
                fed.coordinator.push(task=bad)
                answer = await fed.coordinator.until("answer", number)
                assert (False, True) == (answer.accepted, bool(answer.reason))
            fed.order(1)
            await fed.done(1)
        assert [] == fed.coordinator.all("failed")

    run_scenario(tmp_path, scenario)
    assert "refused: lr is nan" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config_json": "[" * 100_000}, "more than 100 lists and tables in each other"),
        ({"config_json": '{"a":' * 101 + "1" + "}" * 101}, "more than 100 lists and tables in each other"),
        ({"config_json": "x" * 1_000_001}, "1000001 letters"),
        ({"config_json": "{"}, "cannot be read: Expecting"),
        ({"config_json": job(work={"batch_size": 2**31})}, "batch_size is"),
        ({"shards": []}, "0 aggregators"),
        ({"shards": [coordinator_pb2.Shard(address="a:1")] * 1001}, "1001 aggregators"),
        ({"shards": [coordinator_pb2.Shard(address="a" * 300)]}, "the address of an aggregator has 300"),
        ({"shards": [coordinator_pb2.Shard(address="127.0.0.1:9", tensors=["no"])]}, "the model does not have"),
        ({"run": "x" * 201}, "the name of the run has 201 letters"),
        ({"run": "night\x1b[2J"}, "cannot be printed"),
        ({"instance": "x" * 300}, "the instance has"),
    ],
)
def test_bad_offers_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.coordinator.until("hello")
            offer = {
                "run": "other",
                "config_json": run_table(),
                "model_digest": SPEC.digest,
                "shards": [coordinator_pb2.Shard(address=fed.addresses[0])],
            }
            fed.coordinator.push(run=coordinator_pb2.RunOffer(**{**offer, **change}))
            message = (await fed.coordinator.until("failed")).message
            assert words in message
            assert message.isprintable()
            await fed.joined()
        assert ["night%2F1"] == [path.name for path in tmp_path.iterdir() if path.name != "profiles"]

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e-9])
def test_senseless_heartbeats_do_not_flood(tmp_path: Path, seconds: float) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            await fed.done(0)
        assert len(fed.coordinator.all("heartbeat")) < 10

    run_scenario(tmp_path, scenario, heartbeat_seconds=seconds)


def test_many_welcomes_are_one_heartbeat(tmp_path: Path) -> None:
    """Each began a heartbeat of its own, until the agent and its coordinator did nothing else."""

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.coordinator.until("hello")
            for _ in range(50):
                fed.coordinator.push(welcome=coordinator_pb2.Welcome(heartbeat_seconds=0.01, protocol=PROTOCOL))
            await fed.joined()
            beating = [task for task in asyncio.all_tasks() if "Session._beat" in str(task.get_coro())]
            assert 1 == len(beating)

    run_scenario(tmp_path, scenario)


def test_unknown_phase_does_not_end_the_agent(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined()
            fed.coordinator.push(ended=coordinator_pb2.RunEnded(run=RUN, phase=99))  # type: ignore[arg-type]
            fed.offer()
            await fed.coordinator.until("join", 2)
        assert 1 == fed.coordinator.sessions

    run_scenario(tmp_path, scenario)


def test_offers_that_are_replaced_are_not_prepared(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.coordinator.until("hello")
            trainers.made.clear()
            for instance in range(50):
                fed.offer(run_table("noted"), instance=str(instance))
            fed.order(0)
            await fed.coordinator.until("answer")
            trainers.release.set()
            await fed.coordinator.until("join")
        assert 1 <= len(trainers.made) <= 2, "the last one, and one that was begun before it came"

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize(
    "refusal",
    [
        (Code.UNKNOWN, ""),
        (Code.INTERNAL, ""),
        (Code.RESOURCE_EXHAUSTED, "disk"),
        (Code.UNAVAILABLE, "not_open"),
        (Code.DATA_LOSS, "checksum"),
    ],
)
def test_passing_errors_keep_the_update(tmp_path: Path, refusal: tuple[Code, str]) -> None:
    async def scenario(fed: Federation) -> None:
        fed.aggregator.refusals = [refusal]
        async with running(fed.agent()):
            await fed.joined(run_table("counting"))
            fed.order(0)
            await fed.done(0)
        assert ([100], 1) == (trainers.calls, len(fed.aggregator.updates()))
        assert [] == fed.coordinator.all("failed")

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize(
    "refusals",
    [
        [(Code.FAILED_PRECONDITION, "unplanned")],
        [(Code.FAILED_PRECONDITION, "late")],
        [(Code.INVALID_ARGUMENT, "shape")],
        [(Code.INVALID_ARGUMENT, "not_finite")],
        [(Code.ALREADY_EXISTS, "conflict")],
        [(Code.DATA_LOSS, "checksum")] * 2,
    ],
)
def test_final_refusals_drop_the_update(tmp_path: Path, refusals: list[tuple[Code, str]]) -> None:
    async def scenario(fed: Federation) -> None:
        fed.aggregator.refusals = list(refusals)
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            assert f"{refusals[0][1]}: not like this" == (await fed.coordinator.until("failed")).message
            fed.order(1)
            await fed.done(1)
        assert [1] == [update.report.round_num for update in fed.aggregator.updates()]
        assert ["update-1"] == [path.name for path in tmp_path.glob("*/update-*")]

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize(
    ("code", "reason", "slow"),
    [
        (Code.UNAVAILABLE, "damaged", True),
        (Code.UNAUTHENTICATED, "expired", True),
        (Code.UNAVAILABLE, "starting", False),
    ],
)
def test_what_needs_people_is_tried_slowly(code: Code, reason: str, slow: bool) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def attempt() -> str:
        if not waits:
            raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata((REASON, reason)), "no")
        return "sent"

    run: Any = SimpleNamespace(name=RUN, sleep=sleep)
    assert "sent" == asyncio.run(retry_until_answered(run, "upload", attempt))
    assert [slow] == [seconds > 5 for seconds in waits]


def test_long_messages_are_cut(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined(run_table("verbose"))
            fed.order(0)
            message = (await fed.coordinator.until("failed")).message
            assert (True, 1003) == (message.isprintable(), len(message))

    run_scenario(tmp_path, scenario)
