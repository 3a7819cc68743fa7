"""Small limits that need no server: labels, silence, what is tried again, what is worth a warning."""

from __future__ import annotations

import time
from dataclasses import replace

import grpc
import pytest
from fedel_coordinator.record_keeping import over_budget
from fedel_coordinator.sessions import Device, Sessions
from fedel_coordinator.shards import passes, refusal
from grpc import aio
from prometheus_client import CollectorRegistry

from fedel.telemetry import MAX_DEVICE_TYPES, CoordinatorMetrics
from fedel.wire.streams import REASON
from tests.services.coordinator.test_watch import ENTRY, RECORD


def test_device_types_have_a_limited_number_of_labels() -> None:
    metrics = CoordinatorMetrics(CollectorRegistry())
    labels = {metrics.device_label(f"type-{i}") for i in range(2 * MAX_DEVICE_TYPES)}
    assert MAX_DEVICE_TYPES + 1 == len(labels)
    assert ("type-0", "other") == (metrics.device_label("type-0"), metrics.device_label("new"))


def test_time_in_which_this_process_did_not_run_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sessions = Sessions(15.0, lambda: now)
    sessions.close(sessions.open("a", Device()))
    sessions.heard("a")
    now = 100.0
    sessions.pulse()
    assert sessions.present("a")
    for _ in range(4):
        now += 5.0
        sessions.pulse()
    assert not sessions.present("a")


def error_of(code: grpc.StatusCode, text: str) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details=text)


def test_a_message_that_is_too_large_is_not_tried_again() -> None:
    large = "CLIENT: Received message larger than max (4224600 vs. 4194304)"
    assert not passes(error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, large))
    assert passes(error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "the server's disk is full"))
    assert passes(error_of(grpc.StatusCode.UNAVAILABLE, ""))
    assert not passes(error_of(grpc.StatusCode.NOT_FOUND, ""))


def test_most_clients_over_budget_is_worth_a_warning() -> None:
    over = replace(ENTRY, over_budget=True)
    assert "" == over_budget(replace(RECORD, clients=(over, ENTRY)))
    assert "2 of 3 clients are over budget" in over_budget(replace(RECORD, clients=(over, over, ENTRY)))


def test_a_model_that_is_not_finite_is_called_divergence() -> None:
    trailing = aio.Metadata((REASON, "not_finite"))
    error = aio.AioRpcError(
        grpc.StatusCode.FAILED_PRECONDITION, aio.Metadata(), trailing, details="tensor 'w' is NaN"
    )
    told = refusal("a:1", error)
    assert "tensor 'w' is NaN; training diverged: stop the run and start another with a lower work.lr" in told
