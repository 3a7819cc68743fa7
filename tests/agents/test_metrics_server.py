"""An agent's own metrics."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import pytest
from fedel_edge.agent import Agent
from fedel_edge.metrics_server import serve_metrics
from prometheus_client import CollectorRegistry

from fedel.errors import ServiceError
from fedel.telemetry import AgentMetrics
from tests.agents.stand_ins import federation, running


def test_metrics_are_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with serve_metrics("127.0.0.1:0") as metrics:
        metrics.observe(train_seconds=3.0, budget_seconds=2.0)
        metrics.tasks.labels("done").inc()
        address = caplog.messages[-1].removeprefix("metrics on ")
        with urllib.request.urlopen(address, timeout=10) as answer:
            text = answer.read().decode()
    assert "fedel_agent_budget_deviation_ratio 0.5" in text
    assert 'fedel_agent_tasks_total{outcome="done"} 1.0' in text
    assert 'service="agent"' in text


def test_bad_address_is_named() -> None:
    with pytest.raises(ServiceError, match=r"http = 'nowhere': cannot listen"), serve_metrics("nowhere"):
        pass


def test_no_address_no_server() -> None:
    with serve_metrics("") as metrics:
        assert isinstance(metrics, AgentMetrics)
    registry = CollectorRegistry()
    AgentMetrics(registry).observe(train_seconds=0.0, budget_seconds=2.0)
    assert 0.0 == registry.get_sample_value("fedel_agent_budget_deviation_ratio")


def test_tasks_and_reconnects_are_counted(tmp_path: Path) -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        async with federation(tmp_path) as fed:
            agent = Agent(fed.agent().config, metrics=AgentMetrics(registry))
            async with running(agent):
                await fed.joined()
                fed.order(0)
                await fed.done(0)
                assert 1 == registry.get_sample_value("fedel_agent_connected")
                fed.coordinator.hang_up()
                await fed.coordinator.until("hello", 2)

    asyncio.run(scenario())
    assert 1 == registry.get_sample_value("fedel_agent_tasks_total", {"outcome": "done"})
    assert 1 == registry.get_sample_value("fedel_agent_reconnects_total")
