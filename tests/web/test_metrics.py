"""What Prometheus would scrape is what the run's records say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as aggregating
from fedel_coordinator import gauges
from grpc import aio
from prometheus_client import CollectorRegistry, generate_latest

from fedel.records import RoundRecord
from fedel.report.runs import load
from fedel.strategies import build
from fedel.telemetry import MAX_CLIENTS, CoordinatorMetrics
from fedel.types import Memory, Participant, Task, Tensors, Update
from fedel.v1.aggregator_pb2 import OpenRoundRequest
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.wire.channel import connect
from fedel.wire.codec import participant_to_pb
from fedel.wire.payload import pack
from fedel.wire.streams import fetch_model, model_header, push_model, push_update
from tests.report.fakes import client_record, round_record
from tests.services.coordinator.support import RUN, SPEC, asynchronous, run_config
from tests.strategies.fakes import WORK, FakeTrainer, fleet, initial_model
from tests.web.support import ACCURACIES, Asker, samples, shown


def update_of(trainer: FakeTrainer, model: Tensors) -> Update:
    task = Task(round_num=0, client="client-1", budget_seconds=1.0, work=WORK, seed=1)
    return build({"name": "fedavg"}).fit(task, model, Memory(), trainer)[0]


def record_of(folder: Path, number: int = -1) -> RoundRecord:
    return load(folder / "runs" / RUN).rounds[number]


@asynchronous
async def test_the_coordinators_metrics_are_those_of_its_records(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker):
        federation.start_agents(3, accuracies=ACCURACIES)
        await federation.create(run_config(num_rounds=3))
        await federation.finished()
        found = await asker.metrics()
    record = record_of(tmp_path)
    assert 3 == found["fedel_round_latency_seconds_count", RUN]
    total = sum(record_of(tmp_path, n).latency_seconds for n in range(3))
    assert total == pytest.approx(found["fedel_round_latency_seconds_sum", RUN])
    assert record.latency_seconds == found["fedel_round_last_latency_seconds", RUN]
    assert 3 == found["fedel_rounds_total", "closed", RUN]
    assert record.accuracy == found["fedel_model_accuracy_ratio", RUN]
    assert record.budget_seconds == found["fedel_budget_seconds", RUN]
    assert {"train", "fold", "commit", "evaluate"} <= {
        key[1] for key in found if "fedel_round_phase_seconds" in key
    }
    for entry in record.clients:
        client, (end, front) = entry.client, entry.window or (0, 0)
        assert end == found["fedel_client_window_end_block", client, RUN]
        assert front == found["fedel_client_window_front_block", client, RUN]
        assert entry.num_selected == found["fedel_client_selected_tensors", client, RUN]
    for name, count in record.tensor_clients.items():
        assert count == found["fedel_tensor_clients", RUN, name]
    sent = sum(record_of(tmp_path, n).bytes_up for n in range(3))
    assert 3 * 3 * SPEC.num_bytes - sent == found["fedel_bytes_saved_total", "up", RUN]
    assert 0 == found["fedel_run_active", RUN]
    assert ("process_resident_memory_bytes",) in found
    assert any(key[0] == "fedel_build_info" and "coordinator" in key for key in found)


@asynchronous
async def test_gauges_tell_how_an_open_round_stands(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker):
        agents = federation.start_agents(3)
        for agent in agents:
            agent.hold.clear()
        await federation.create(run_config(num_rounds=1, deadline_floor_seconds=77.0))
        await federation.status(lambda status: status.round_phase == "train")
        found = await asker.metrics()
        assert 3 == found["fedel_sessions",]
        assert (1, 0) == (found["fedel_run_active", RUN], found["fedel_round_number", RUN])
        assert 77 == found["fedel_round_deadline_seconds", RUN]
        opened = federation.coordinator.runs[RUN].state.open
        assert opened is not None
        assert opened.opened_at == found["fedel_round_opened_timestamp_seconds", RUN]
        now = federation.coordinator.clock()
        assert now == pytest.approx(found["fedel_client_last_seen_timestamp_seconds", "client-1", RUN], abs=20)
        await agents[1].leave()
        await federation.status(lambda status: sum(c.connected for c in status.clients) == 2)
        assert ("fedel_client_last_seen_timestamp_seconds", "client-1", RUN) not in await asker.metrics()


@asynchronous
async def test_rounds_of_before_a_restart_are_not_counted_again(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker):
        agents = federation.start_agents(3, script={1: "silent"})
        await federation.create(run_config(num_rounds=2))
        await federation.status(lambda status: status.round_num == 1)
        assert 1 == (await asker.metrics())["fedel_round_latency_seconds_count", RUN]
        for agent in agents:
            agent.script.clear()
        await federation.restart_coordinator()
        await federation.finished()
        found = await asker.metrics()
    assert 1 == found["fedel_round_latency_seconds_count", RUN]
    assert record_of(tmp_path).latency_seconds == found["fedel_round_last_latency_seconds", RUN]


@asynchronous
async def test_what_agents_get_wrong_is_counted(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker):
        stranger = federation.agent("client-4")
        stranger.digest = "another"
        federation.agent("client-0", script={0: "fail"})
        federation.agent("client-1")
        federation.agent("client-2")
        await federation.create(run_config(num_rounds=1))
        await stranger.until("refused")
        await federation.finished()
        found = await asker.metrics()
    assert 1 == found["fedel_messages_refused_total", "join"]
    assert 0 == found["fedel_messages_refused_total", "done"]
    assert 1 == found["fedel_tasks_failed_total", RUN]
    assert 1 == found["fedel_rounds_total", "partial", RUN]


@asynchronous
async def test_a_run_that_is_long_over_leaves_no_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shown(tmp_path) as (federation, asker):
        federation.start_agents(3)
        await federation.create(run_config(num_rounds=1))
        await federation.finished()
        assert any(RUN in key for key in await asker.metrics())
        monkeypatch.setattr(gauges, "KEEP_SECONDS", 0.0)
        await asker.metrics()
        assert not any(RUN in key for key in await asker.metrics())


def test_clients_beyond_the_thousandth_are_in_the_histograms_alone() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    clients = [
        client_record(client=f"client-{i}", deviation=0.1, device_type="orin") for i in range(MAX_CLIENTS + 5)
    ]
    metrics.observe_round("big", round_record(clients=tuple(clients)), 100)
    found = samples(generate_latest(registry).decode())
    assert MAX_CLIENTS + 5 == found["fedel_budget_deviation_ratio_count", "orin", "big"]
    assert MAX_CLIENTS == sum(key[0] == "fedel_client_budget_deviation_ratio" for key in found)


@asynchronous
async def test_an_aggregator_counts_uploads_bytes_and_refusals(tmp_path: Path) -> None:
    config = AggregatorConfig(
        listen="127.0.0.1:0", data_dir=tmp_path / "data", http="127.0.0.1:0", http_port_file=tmp_path / "http"
    )
    trainer = fleet()["client-1"]
    async with (
        aggregating(config) as (address, _),
        connect(address) as channel,
        aiohttp.ClientSession() as session,
    ):
        stub, asker = AggregatorServiceStub(channel), Asker(session, tmp_path / "http")
        model = initial_model()
        await push_model(stub, model_header(RUN, {"name": "fedavg"}, SPEC), model)
        update = update_of(trainer, model)
        payload, report = pack(update.patches), update.report
        planned = Participant(report.client, 0, report.num_samples, report.num_steps, report.effective_steps)
        await stub.OpenRound(OpenRoundRequest(run=RUN, participants=[participant_to_pb(planned)]))
        await push_update(stub, RUN, update.report, payload)
        await push_update(stub, RUN, update.report, payload)
        with pytest.raises(aio.AioRpcError):
            await push_update(stub, RUN, replace(update.report, round_num=5), payload)
        fetched = await fetch_model(stub, RUN)
        found = await asker.metrics()
        assert {"status": "ok"} == await asker.get("/healthz")
    assert [1, 1, 1, 0] == [
        found["fedel_uploads_total", outcome] for outcome in ("accepted", "duplicate", "refused", "broken")
    ]
    assert 1 == found["fedel_uploads_refused_total", "early"]
    assert payload.num_bytes == found["fedel_upload_bytes_total",]
    assert fetched.num_bytes == found["fedel_download_bytes_total",]
    assert 1 == found["fedel_fold_seconds_count",]
    assert 0 == found["fedel_model_version", RUN]
    assert 0 < found["fedel_disk_free_bytes",] <= found["fedel_disk_size_bytes",]
    assert (0, 0) == (found["fedel_upload_permits_in_use",], found["fedel_uploads_waiting",])
