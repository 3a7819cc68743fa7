"""A real Prometheus scrapes a real federation: values are those of rounds.jsonl, every expression has data."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as aggregating
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.server import serve as coordinating
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig

from fedel.desk.submit import create
from fedel.job import RunConfig
from fedel.plugins import Allowed
from fedel.records import RoundRecord
from fedel.report import runs
from fedel.training.settings import DataPart
from tests.agents.stand_ins import running
from tests.agents.test_device import ORIN_NANO, tree
from tests.monitoring import trainers
from tests.monitoring.files import PROMETHEUS, load, metrics_in, panel_expressions, rules
from tests.strategies.fakes import WORK, initial_model, spec

RUN, NUM_CLIENTS, NUM_ROUNDS = "night-1", 4, 5
PATIENCE_SECONDS = 30.0
WITHOUT_DATA = {
    "fedel_tasks_failed_total": "no task failed",
}
"""Metrics that a healthy run does not show, and why."""
SUMS = (
    "fedel_round_latency_seconds_sum",
    "fedel_round_latency_seconds_count",
    "sum(fedel_budget_deviation_ratio_count)",
    'fedel_bytes_sent_total{direction="up"}',
    'fedel_bytes_sent_total{direction="down"}',
    "fedel_model_accuracy_ratio",
    'fedel_clients_accuracy_ratio{statistic="worst"}',
    "fedel_upload_bytes_total",
)
VARIABLES = {"$run": RUN, "$client": ".*", "$__rate_interval": "1m", "$__range": "10m"}
pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is missing: apt-get install prometheus"
)


class Prometheus:
    """The query API."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/"

    def get(self, what: str, **arguments: str) -> Any:
        url = f"{self._url}{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise
            raise AssertionError(f"{arguments}: {error.read().decode()}") from None

    def ask(self, expr: str) -> list[dict[str, Any]]:
        return list(self.get("query", query=expr)["result"])

    def value(self, expr: str) -> float | None:
        found = self.ask(expr)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def by(self, label: str, expr: str) -> dict[str, float]:
        return {one["metric"][label]: float(one["value"][1]) for one in self.ask(expr)}


@dataclass
class Seen:
    """What Prometheus said, round by round and at the end."""

    records: list[RoundRecord] = field(default_factory=list)
    latencies: list[float | None] = field(default_factory=list)
    deviations: list[dict[str, float]] = field(default_factory=list)
    fronts: list[dict[str, float]] = field(default_factory=list)
    numbers: dict[str, float | None] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    """Expression to how many series it returned."""
    alerts: set[tuple[str, str]] = field(default_factory=set)
    """Names and clients of those that fire."""


@contextmanager
def prometheus(folder: Path, targets: dict[str, str]) -> Iterator[Prometheus]:
    """With our own configuration, but for addresses and hurry."""
    settings = load(PROMETHEUS / "prometheus.yml")
    settings["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    settings["rule_files"] = [str(PROMETHEUS / "rules" / "*.yml")]
    for job in settings["scrape_configs"]:
        if job["job_name"] in targets:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(address)
    finally:
        process.kill()
        process.wait()


async def until(what: str, condition: Any) -> None:
    """Wait for Prometheus, which looks when it likes; it may not be ready yet."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if await asyncio.to_thread(condition):
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.05)


@asynccontextmanager
async def federation(folder: Path) -> AsyncIterator[dict[str, str]]:
    """Servers and agents on make-believe Jetsons, with a run; gives where metrics are, by the job's name."""
    job = RunConfig.parse(
        {
            "strategy": {"name": "fedel"},
            "rounds": {
                "num_rounds": NUM_ROUNDS,
                "min_clients": NUM_CLIENTS,
                "deadline_floor_seconds": 600.0,
                "evaluate_clients_every": NUM_ROUNDS,  # a test would wait for the turn of the next round
            },
            "budget": {"pace": "plan"},
            "work": asdict(WORK),
            "trainer": "tests.monitoring.trainers:in_turn",
        }
    )
    loopback, jetson = "127.0.0.1:0", tree(folder / "jetson", ORIN_NANO)
    async with AsyncExitStack() as stack:
        bulk = AggregatorConfig(loopback, folder / "a", http=loopback, http_port_file=folder / "a.http")
        aggregator, _ = await stack.enter_async_context(aggregating(bulk))
        config = CoordinatorConfig(
            loopback,
            aggregators=(aggregator,),
            database_url=f"sqlite:///{folder / 'c.db'}",
            runs_dir=folder / "runs",
            heartbeat_seconds=0.2,
            silent_heartbeats=100,
            http=loopback,
            http_port_file=folder / "c.http",
        )
        address, _ = await stack.enter_async_context(coordinating(config))
        for index in range(NUM_CLIENTS):
            part = DataPart(index, NUM_CLIENTS)
            agent = AgentConfig(
                address,
                f"client-{index}",
                folder / f"client-{index}",
                data=part,
                evaluate=index == 0,
                code=Allowed(("tests",)),
            )
            await stack.enter_async_context(running(Agent(agent, jetson)))
        await create(address, RUN, job, spec(), initial_model())
        yield {
            "fedel-coordinator": (folder / "c.http").read_text(),
            "fedel-aggregator": (folder / "a.http").read_text(),
        }


def filled(expr: str) -> str:
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr


async def watch(folder: Path) -> Seen:
    seen = Seen()
    trainers.turns = threading.Semaphore(0)
    async with federation(folder) as targets:
        with prometheus(folder, targets) as db:
            await until("both targets", lambda: 2.0 == db.value('sum(up{job=~"fedel-.+"})'))
            for round_num in range(NUM_ROUNDS):
                await until("the round is open", lambda n=round_num: n == db.value("fedel_round_number"))
                trainers.turns.release(NUM_CLIENTS)
                await until("it is closed", lambda n=round_num: n + 1 == db.value("sum(fedel_rounds_total)"))
                await until("its figures", lambda: read_round(db, seen))
                if round_num == NUM_ROUNDS - 2:
                    await look_around(db, seen)
            await until("the run is over", lambda: db.value("fedel_run_active") == 0)
            await until("its last model", lambda: db.value("fedel_model_version") == NUM_ROUNDS)
            await until("its sums", lambda: read_sums(db, seen))
            for expr in filter(_is_of_own_tests, map(filled, panel_expressions())):
                seen.samples[expr] = len(await asyncio.to_thread(db.ask, expr))
            seen.records = runs.load(folder / "runs" / RUN).rounds
    return seen


def read_round(db: Prometheus, seen: Seen) -> bool:
    """False if a scrape was missed, as may happen on a busy machine."""
    latency = db.value("fedel_round_last_latency_seconds")
    deviations = db.by("client", "fedel_client_budget_deviation_ratio")
    fronts = db.by("client", "fedel_client_window_front_block")
    if latency is None or not deviations or not fronts:
        return False
    seen.latencies.append(latency)
    seen.deviations.append(deviations)
    seen.fronts.append(fronts)
    return True


def read_sums(db: Prometheus, seen: Seen) -> bool:
    seen.numbers = {expr: db.value(expr) for expr in SUMS}
    return None not in seen.numbers.values()


def _is_of_own_tests(expr: str) -> bool:
    return bool(metrics_in(expr) & {"fedel_clients_accuracy_ratio", "fedel_device_type_accuracy_ratio"})


async def look_around(db: Prometheus, seen: Seen) -> None:
    """Every expression, in the middle of the run."""
    await until("an alert", lambda: bool(db.ask('ALERTS{alertname="FedelClientOverBudget"}')))
    wanted = {filled(expr) for expr in panel_expressions() if not _is_of_own_tests(expr)}
    wanted |= {rule["expr"] for rule in rules("record")}
    for rule in rules("alert"):
        await asyncio.to_thread(db.ask, rule["expr"])
        wanted |= metrics_in(rule["expr"])

    def read() -> bool:
        for expr in sorted(wanted - {e for e, number in seen.samples.items() if number}):
            seen.samples[expr] = len(db.ask(expr))
        return WITHOUT_DATA.keys() >= {expr for expr, number in seen.samples.items() if number == 0}

    # A rate needs two scrapes. What stays empty is for the test to name.
    with suppress(AssertionError):
        await until("data for everything", read)
    firing = await asyncio.to_thread(db.ask, 'ALERTS{alertstate="firing"}')
    seen.alerts = {(one["metric"]["alertname"], one["metric"].get("client", "")) for one in firing}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return asyncio.run(watch(tmp_path_factory.mktemp("watched")))


def test_round_latency_is_that_of_the_runs_records(seen: Seen) -> None:
    latencies = [record.latency_seconds for record in seen.records]
    assert NUM_ROUNDS == len(latencies)
    assert latencies == seen.latencies
    assert NUM_ROUNDS == seen.numbers["fedel_round_latency_seconds_count"]
    assert pytest.approx(sum(latencies)) == seen.numbers["fedel_round_latency_seconds_sum"]


def test_the_deviation_of_every_client_is_that_of_the_runs_records(seen: Seen) -> None:
    expected = [{c.client: c.deviation for c in record.clients} for record in seen.records]
    assert NUM_CLIENTS == len(expected[0])
    assert None not in [deviation for clients in expected for deviation in clients.values()]
    assert expected == seen.deviations
    assert NUM_CLIENTS * NUM_ROUNDS == seen.numbers["sum(fedel_budget_deviation_ratio_count)"]


def test_windows_and_bytes_are_those_of_the_runs_records(seen: Seen) -> None:
    expected = [{c.client: float(c.window[1]) for c in r.clients if c.window} for r in seen.records]
    assert expected == seen.fronts
    assert len({front for fronts in expected for front in fronts.values()}) > 1, "no window moved: a blind test"
    up, down = (sum(found) for found in zip(*((r.bytes_up, r.bytes_down) for r in seen.records), strict=True))
    assert up == seen.numbers['fedel_bytes_sent_total{direction="up"}']
    assert down == seen.numbers['fedel_bytes_sent_total{direction="down"}']
    assert up == seen.numbers["fedel_upload_bytes_total"]
    assert seen.records[-1].accuracy == seen.numbers["fedel_model_accuracy_ratio"]


def test_every_expression_of_dashboards_and_rules_returns_data(seen: Seen) -> None:
    assert len(seen.samples) > 80
    empty = {expr for expr, number in seen.samples.items() if number == 0}
    assert WITHOUT_DATA.keys() == empty


def test_tests_on_own_data_are_those_of_the_runs_records(seen: Seen) -> None:
    tests = seen.records[-1].client_tests
    assert tests is not None
    assert tests.overall.worst_accuracy == seen.numbers['fedel_clients_accuracy_ratio{statistic="worst"}']


def test_the_client_that_is_slower_than_promised_is_the_only_alert(seen: Seen) -> None:
    assert {("FedelClientOverBudget", f"client-{trainers.HOT}")} == seen.alerts
