"""What monitoring costs: a scrape and the live page of a coordinator with a thousand clients.

    python -m benchmarks.scrape [--clients 1000] [--picture FILE]

The clients are rows in the store, and their rounds are made up. The coordinator, its HTTP server and the
browser are real. Without Chromium the page is skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as aggregating
from fedel_coordinator.activity import Activity
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.persistence import spec_to_json
from fedel_coordinator.server import serve
from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import ClientRow, RoundRow, RunRow

from fedel.job import RunConfig
from fedel.records import ClientRecord, DeviceUsage, RoundRecord
from fedel.roles.run_state import CLOSED, PAUSED
from fedel.serialisation import to_json
from fedel.types import BlockTime as Block
from fedel.types import ModelSpec, TensorSpec, TensorTime, TimingProfile, Window
from tests.web.browser import browsing, program

RUN = "thousand"
NUM_BLOCKS, NUM_ROUNDS, NUM_SCRAPES, SCRAPE_EVERY_SECONDS = 16, 50, 10, 15.0
BUDGET_SECONDS = 2.0
DEVICES = ("jetson-orin-nano", "jetson-xavier-nx", "raspberry-pi-5", "raspberry-pi-4")


def spec() -> ModelSpec:
    """As many blocks and tensors as VGG16 has."""
    names = tuple(f"conv{number}" for number in range(1, NUM_BLOCKS + 1))
    kinds = {"weight": (64, 64, 3, 3), "bias": (64,)}
    tensors = [
        TensorSpec(f"blocks.{name}.{kind}", number, shape)
        for number, name in enumerate(names, start=1)
        for kind, shape in kinds.items()
    ]
    return ModelSpec("vgg16", names, tuple(tensors))


def entry(client: int, number: int, model: ModelSpec, dice: random.Random) -> ClientRecord:
    """The part of a client in the record of a round; its window has moved by a block or two."""
    end = 1 + (client + number * (1 + client % 2)) % (NUM_BLOCKS - 3)
    selected = [t.name for t in model.weights_in(end, end + 3)]
    seconds = BUDGET_SECONDS * dice.uniform(0.75, 1.25)
    return ClientRecord(
        client=f"device-{client:04d}",
        device_type=DEVICES[client % len(DEVICES)],
        window=(end, end + 3),
        resets=number * (1 + client % 2) // NUM_BLOCKS,
        num_selected=len(selected),
        selected=tuple(selected),
        num_steps=20,
        num_samples=500,
        loss=1.0,
        budget_seconds=BUDGET_SECONDS,
        predicted_seconds=1.9,
        predicted_forward_seconds=0.6,
        predicted_backward_seconds=1.3,
        train_seconds=seconds,
        deviation=seconds / BUDGET_SECONDS - 1,
        predicted_deviation=1.9 / BUDGET_SECONDS - 1,
        over_budget=False,
        peak_memory_bytes=1 << 30,
        bytes_up=4 * sum(model.by_name[name].size for name in selected),
        bytes_down=model.num_bytes // 2,
        phases={"download": 0.4, "train": seconds, "upload": 0.3, "wait": 0.1},
        device=DeviceUsage(9.5, 9.5 * seconds, 55.0),
    )


def record(number: int, num_clients: int, model: ModelSpec) -> RoundRecord:
    dice = random.Random(number)
    entries = [entry(client, number, model, dice) for client in range(num_clients)]
    trained = [name for told in entries for name in told.selected]
    return RoundRecord(
        round=number,
        strategy="fedel",
        budget_seconds=BUDGET_SECONDS / 20,
        num_tasks=num_clients,
        num_updates=num_clients,
        num_late=0,
        loss=1.0,
        o1=0.4,
        clients=tuple(entries),
        version=number + 1,
        opened_at=1.7e9 + 5 * number,
        latency_seconds=4 + dice.random(),
        phases={"train": 2.5, "fold": 0.2, "commit": 0.1},
        bytes_up=sum(told.bytes_up for told in entries),
        bytes_down=sum(told.bytes_down for told in entries),
        tensor_clients={t.name: trained.count(t.name) for t in model.weights},
        tensor_untrained_rounds={t.name: 0 for t in model.weights},
        accuracy=0.8 - 0.7 * 0.93**number,
        test_loss=1.0,
    )


def fill(store: SqlStore, num_clients: int) -> list[RoundRecord]:
    """A run with its clients and closed rounds; paused, so that it does not change during the measurement."""
    model, job = spec(), RunConfig.parse({"rounds": {"num_rounds": 200}})
    state = json.dumps({"round_num": NUM_ROUNDS})
    store.create_run(
        RunRow(RUN, json.dumps(job.table()), spec_to_json(model), 1, PAUSED, time.time(), state_json=state)
    )
    times = tuple(TensorTime(t.name, t.block, 1e-3, 1e-3) for t in model.weights)
    profile = TimingProfile(
        "fake", model.name, 32, times, tuple(Block(1e-3, 1e-4, 1e-4) for _ in range(NUM_BLOCKS))
    )
    for client in range(num_clients):
        kind = DEVICES[client % len(DEVICES)]
        text = to_json(profile)
        store.put_client(ClientRow(RUN, f"device-{client:04d}", kind, 8 << 30, "1", 500, False, text))
    records = [record(number, num_clients, model) for number in range(NUM_ROUNDS)]
    plan = json.dumps({"tasks": [], "state": {}})
    for told in records:
        store.put_round(RoundRow(RUN, told.round, CLOSED, plan, told.opened_at, told.to_json()))
    return records


async def measure_scrapes(address: str) -> dict[str, float]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def scrape(encoding: str) -> bytes:
            async with session.get(
                f"http://{address}/metrics", headers={"Accept-Encoding": encoding}
            ) as answer:
                return await answer.read()

        plain, zipped = await scrape("identity"), await scrape("gzip")
        assert plain.count(b"\n") == gzip.decompress(zipped).count(b"\n")
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(NUM_SCRAPES):
            await scrape("gzip")
        seconds = (time.perf_counter() - wall) / NUM_SCRAPES
        cpu_seconds = (time.process_time() - cpu) / NUM_SCRAPES
    return {
        "scrape_seconds": seconds,
        "scrape_cpu_seconds": cpu_seconds,
        "scrape_bytes": len(plain),
        "scrape_gzip_bytes": len(zipped),
        "series": sum(1 for line in plain.splitlines() if not line.startswith(b"#")),
        "cpu_share_at_15_s": cpu_seconds / SCRAPE_EVERY_SECONDS,
    }


async def stir(coordinator: Coordinator) -> None:
    """Two hundred clients per second change, as in a running round."""
    run, dice = coordinator.runs[RUN], random.Random(0)
    members = sorted(run.state.members)
    while True:
        for member in dice.sample(members, min(20, len(members))):
            end = dice.randint(1, NUM_BLOCKS - 3)
            run.activities[member] = Activity(
                phase=dice.choice(("download", "train", "upload", "done")),
                window=Window(end, end + 3),
                train_seconds=dice.uniform(1.5, 2.5),
                budget_seconds=BUDGET_SECONDS,
            )
        run.change.notify()
        await asyncio.sleep(0.1)


async def measure_page(
    coordinator: Coordinator, address: str, folder: Path, picture: Path | None
) -> dict[str, Any]:
    async with browsing(folder) as page:
        await page.show_as(1280, 900)
        begin = time.perf_counter()
        await page.open(f"http://{address}/#run={RUN}")
        await page.until("document.querySelector('#clients tbody tr')")
        first_row = time.perf_counter() - begin
        await page.until(
            f"document.querySelector('#figures dd small').textContent.startsWith('{NUM_ROUNDS} of')"
        )
        stirring = asyncio.ensure_future(stir(coordinator))
        cpu, wall = time.process_time(), time.perf_counter()
        frames = await page.run(
            "new Promise(resolve => { let n = 0, last = performance.now(), worst = 0; const begin = last;"
            "const step = now => { n++; worst = Math.max(worst, now - last); last = now;"
            "now - begin < 5000 ? requestAnimationFrame(step) : resolve([n / 5, worst]) };"
            "requestAnimationFrame(step); })"
        )
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        search = await page.run(
            "(() => { const field = document.getElementById('search'), begin = performance.now();"
            "field.value = '0999'; field.dispatchEvent(new Event('input'));"
            "document.body.offsetHeight; return performance.now() - begin; })()"
        )
        found = await page.run("document.querySelectorAll('#clients tbody tr').length")
        await page.run("document.getElementById('search').value = ''")
        begin = time.perf_counter()
        await page.run("document.querySelector('#clients tbody button').click()")
        await page.until("document.querySelector('#mine path.cells')")
        opened = time.perf_counter() - begin
        nodes = await page.run("document.getElementsByTagName('*').length")
        if picture:
            await page.picture(picture)
        stirring.cancel()
    return {
        "first_row_seconds": first_row,
        "frames_a_second": frames[0],
        "worst_frame_ms": frames[1],
        "coordinator_cpu_share_with_one_viewer": share,
        "search_ms": search,
        "search_rows": found,
        "open_client_seconds": opened,
        "dom_nodes": nodes,
        "complaints": page.complaints,
    }


async def main(num_clients: int, picture: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = SqlStore(f"sqlite:///{folder}/coordinator.db")
        records = fill(store, num_clients)
        async with aggregating(AggregatorConfig(listen="127.0.0.1:0", data_dir=folder / "data")) as (bulk, _):
            config = CoordinatorConfig(
                listen="127.0.0.1:0", aggregators=(bulk,), http="127.0.0.1:0", http_port_file=folder / "http"
            )
            async with serve(config, store) as (_, coordinator):
                for told in records[-5:]:
                    coordinator.metrics.observe_round(RUN, told, spec().num_bytes)
                address = (folder / "http").read_text()
                figures: dict[str, Any] = {"clients": num_clients} | await measure_scrapes(address)
                if program():
                    figures |= await measure_page(coordinator, address, folder / "profile", picture)
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    json.dump(asyncio.run(main(options.clients, options.picture)), sys.stdout, indent=2)
    print()
