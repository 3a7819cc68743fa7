"""One trace per round, at a collector that speaks OTLP; and no trouble from a collector that is away."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fedel_coordinator.round_spans import MAX_CLIENTS, Span, spans_of
from fedel_coordinator.traces import traces_to
from grpc import aio

from fedel.errors import ConfigError
from fedel.records import ClientRecord, RoundRecord
from tests.services.coordinator.support import RUN, Federation, asynchronous, run_config

PHASES = {"download": 0.5, "probe": 0.25, "train": 1.0, "wait": 0.0, "upload": 0.25}
CLIENT = ClientRecord(
    *("jetson-1", (1, 3), 0, 4, ("a",), 8, 100, 0.5, 1.0, 1.0, 0.5, 0.5, 1.25, 0.25, 0.0, False, 10**6),
    device_type="orin",
    phases=PHASES,
)
RECORD = RoundRecord(
    *(6, "fedel", 0.125, 2, 1, 0.5, 0.0, (CLIENT,)),
    version=7,
    opened_at=1000.0,
    latency_seconds=4.0,
    collect_seconds=3.0,
    phases={**PHASES, "fold": 0.75, "commit": 0.5},
    accuracy=0.25,
    evaluate_seconds=9.0,
    refused={"jetson-2": "out of memory"},
)


def ends(span: Span) -> float:
    return span.start + span.seconds


def test_the_spans_of_a_round_fit_its_record() -> None:
    made = spans_of("night-1", RECORD)
    parts = {span.name: span for span in made.children}
    assert ["plan", "task", "seal", "fold", "commit", "evaluate"] == list(parts)
    assert (1000.0, 1004.0) == (made.start, ends(made))
    assert (1003.0, 1003.5) == (parts["seal"].start, ends(parts["seal"]))
    assert (1003.5, 1004.0) == (parts["commit"].start, ends(parts["commit"]))
    assert ({0.75}, {9.0}) == ({parts["fold"].seconds}, {parts["evaluate"].seconds})
    phases = parts["task"].children
    assert ["download", "probe", "train", "upload"] == [span.name for span in phases]
    assert [1000.0, 1000.5, 1000.75, 1001.75] == [span.start for span in phases]
    assert ends(phases[-1]) == ends(parts["task"]) == 1002.0
    assert {"fedel.run": "night-1", "fedel.round": 6, "fedel.version": 7}.items() <= made.attributes.items()
    assert {"fedel.client": "jetson-1", "fedel.window_end": 1}.items() <= parts["task"].attributes.items()
    assert ({"name": "lost", "fedel.client": "jetson-2", "reason": "out of memory"},) == made.events


def test_a_large_fleet_has_spans_for_its_slowest_clients() -> None:
    clients = tuple(
        replace(CLIENT, client=f"c{number}", phases={"train": float(number + 1)}) for number in range(150)
    )
    made = spans_of("night-1", replace(RECORD, clients=clients))
    tasks = [span.attributes["fedel.client"] for span in made.children if span.name == "task"]
    assert [f"c{number}" for number in range(149, 49, -1)] == tasks
    assert (MAX_CLIENTS, 50) == (len(tasks), made.attributes["fedel.num_clients_without_span"])


def test_a_record_that_knows_little_makes_spans_too() -> None:
    bare = replace(RECORD, clients=(), phases={}, accuracy=None, evaluate_seconds=None, collect_seconds=0.0)
    assert ["plan", "seal", "fold", "commit"] == [span.name for span in spans_of("r", bare).children]


class Collector:
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.address = ""

    async def Export(self, request: Any, context: Any) -> Any:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return ExportTraceServiceResponse()


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc", reason="fedel[otel] is not installed"
    )
    server, made = aio.server(), Collector()
    service.add_TraceServiceServicer_to_server(made, server)
    made.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield made
    finally:
        await server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


@asynchronous
async def test_a_federation_sends_one_trace_per_round(tmp_path: Path) -> None:
    async with collector() as made:
        async with Federation(tmp_path, traces=made.address) as federation:
            await federation.create(run_config())
            federation.start_agents(3, accuracies={1: 0.1, 2: 0.2, 3: 0.3})
            records = await federation.finished()
        rounds = {span.trace_id: span for span in made.spans if span.name == "round"}
        assert [0, 1, 2] == sorted(attributes(span)["fedel.round"] for span in rounds.values())
        assert {RUN} == {attributes(span)["fedel.run"] for span in rounds.values()}
        for trace, root in rounds.items():
            record = records[attributes(root)["fedel.round"]]
            inside = [span for span in made.spans if span.trace_id == trace and span is not root]
            below = sorted(span.name for span in inside if span.parent_span_id == root.span_id)
            assert sorted(["plan", "task", "task", "task", "seal", "fold", "commit", "evaluate"]) == below
            assert 9 == sum(span.name in PHASES for span in inside), "three phases of three clients"
            seconds = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
            assert abs(record.latency_seconds - seconds) < 1e-3
            assert abs(record.opened_at - root.start_time_unix_nano / 1e9) < 1e-3


@asynchronous
async def test_nobody_waits_for_a_collector_that_is_away(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="fedel[otel] is not installed")
    async with Federation(tmp_path, traces="http://127.0.0.1:9") as federation:
        await federation.create(run_config(evaluate_every=0))
        federation.start_agents(3)
        assert 3 == len(await federation.finished())


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"write http://host:4317"):
        traces_to("collector:4317")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedel\[otel\]'"):
        traces_to("http://127.0.0.1:4317")
