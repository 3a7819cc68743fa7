"""What an operator waits for with many runs: `fedel runs`, `fedel status`, the page and the list behind it.

    python -m benchmarks.many_runs [--runs 50] [--clients 1000]

The runs are rows in a database, made up; all but one are over. The coordinator is a process of its own, and so
is each command. Without Chromium the page is skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

from fedel_coordinator.persistence import spec_to_json
from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import RoundRow, RunRow

from benchmarks.scrape import NUM_ROUNDS, RUN, fill, record, spec
from fedel.desk import child
from fedel.job import RunConfig
from fedel.roles.planner import Handover
from fedel.roles.run_state import CLOSED, FINISHED
from fedel.serialisation import to_json
from fedel.types import Report, StepCost
from tests.web.browser import browsing, program

CALL = """
import sys
from fedel.cli.main import main
code = main(sys.argv[1:])
sys.stderr.write(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""
ROUNDS_OF_OTHERS = 3
TIMES = 3


def fill_others(store: SqlStore, number: int, num_clients: int) -> None:
    """Runs that are over, each with what its clients last reported and a few rounds."""
    model, table = spec(), json.dumps(RunConfig.parse({"rounds": {"num_rounds": ROUNDS_OF_OTHERS}}).table())
    clients = [f"device-{client:04d}" for client in range(num_clients)]
    selected = tuple(tensor.name for tensor in model.weights_in(3, 6))
    reports = {
        client: Report(client, 2, 500, 20, 20.0, 1.0, cost=StepCost(0.1, 0.2), selected=selected)
        for client in clients
    }
    state = to_json(Handover(round_num=ROUNDS_OF_OTHERS, reports=reports))
    rounds = [record(n, num_clients, model).to_json() for n in range(ROUNDS_OF_OTHERS)]
    row = RunRow("", table, spec_to_json(model), 1, FINISHED, 0.0, state_json=state, model_version=3)
    for index in range(number):
        name, at = f"sweep-{index:03d}", time.time() - 3600 * (number - index)
        store.create_run(replace(row, name=name, created_at=at, ended_at=at + 600))
        for round_num, text in enumerate(rounds):
            store.put_round(RoundRow(name, round_num, CLOSED, "{}", at, text))


def timed(*words: str) -> dict[str, float]:
    """The best of a few calls of ``fedel``: seconds, and megabytes at most."""
    found = []
    for _ in range(TIMES):
        begin, before = time.perf_counter(), os.times()
        # The process tells its own peak: what wait4 says includes the size of this one.
        done = subprocess.run([sys.executable, "-c", CALL, *words], capture_output=True, text=True, check=True)
        seconds, after = time.perf_counter() - begin, os.times()
        cpu = sum(after[2:4]) - sum(before[2:4])
        found.append((seconds, cpu, int(done.stderr.split()[-2]) / 1e3, done.stdout.count("\n")))
    return dict(zip(("seconds", "cpu_seconds", "megabytes", "lines"), min(found), strict=True))


def resident_megabytes(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS"))


async def first_row_seconds(address: str, folder: Path) -> float:
    async with browsing(folder) as page:
        begin = time.perf_counter()
        await page.open(f"http://{address}/")
        await page.until("document.querySelector('#clients tbody tr')")
        return time.perf_counter() - begin


def waited_for(file: Path) -> str:
    while not file.exists():
        time.sleep(0.05)
    return file.read_text(encoding="ascii")


def measure(folder: Path, num_runs: int, num_clients: int) -> dict[str, object]:
    url = f"sqlite:///{folder}/coordinator.db"
    store = SqlStore(url)
    fill(store, num_clients)
    fill_others(store, num_runs - 1, num_clients)
    whole, brief = (min(_seconds(lambda b=b: store.runs(brief=b)) for _ in range(TIMES)) for b in (False, True))
    store.close()
    settings = {
        "listen": "127.0.0.1:0",
        "port_file": f"{folder}/port",
        "http": "127.0.0.1:0",
        "http_port_file": f"{folder}/http",
        "database_url": url,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    begin = time.perf_counter()
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(child.command("fedel_coordinator", *words), stdout=log, stderr=log)
    try:
        address, http = waited_for(folder / "port"), waited_for(folder / "http")
        started = time.perf_counter() - begin
        before = resident_megabytes(server.pid)
        found: dict[str, object] = {
            "list_from_database_seconds": {"whole rows": whole, "as listed": brief},
            "coordinator_start_seconds": started,
            "fedel runs": timed("runs", "--coordinator", address),
            "fedel status": timed("status", RUN, "--coordinator", address),
        }
        begin = time.perf_counter()
        with urllib.request.urlopen(f"http://{http}/api/runs") as answer:
            size = len(answer.read())
        found["api_runs"] = {"seconds": time.perf_counter() - begin, "bytes": size}
        if program():
            found["page_first_row_seconds"] = asyncio.run(first_row_seconds(http, folder / "profile"))
        found["coordinator_megabytes"] = {"after start": before, "after all": resident_megabytes(server.pid)}
        return found
    finally:
        server.terminate()
        server.wait()


def _seconds(call: object) -> float:
    begin = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--clients", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"{arguments.runs} runs of {arguments.clients} clients, {NUM_ROUNDS} rounds of the newest")
        print(json.dumps(measure(Path(folder), arguments.runs, arguments.clients), indent=2))


if __name__ == "__main__":
    main()
