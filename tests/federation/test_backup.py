"""A machine is lost: its servers start again elsewhere from a backup, and the devices go on."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fedel import config
from fedel.chaos.processes import Process
from fedel.cli.main import main
from tests.federation.processes import REPOSITORY, RUN, Federation, federation, gate_of
from tests.federation.support import job_of, model_of, simulated, watching
from tests.strategies.fakes import same_bits

NUM_CLIENTS, NUM_ROUNDS = 3, 6
SAVED, LOST = 2, 4
"""The rounds that are open when the backup is made and when the machine is lost."""
CLIENTS = [f"client-{index}" for index in range(NUM_CLIENTS)]
LARGE = 72
"""Scale of a model of 8 MB."""


def settings(made: Federation, folder: Path) -> dict[str, dict[str, object]]:
    """Of servers with empty folders and the old addresses."""
    bulk = (made.folder / "a.address").read_text(encoding="utf-8")
    return {
        "aggregator": {"listen": bulk, "data_dir": str(folder / "data"), "port_file": str(folder / "a")},
        "coordinator": {
            "listen": made.address,
            "port_file": str(folder / "c"),
            "aggregators": [bulk],
            "public_aggregators": [made.proxy.address],
            "database_url": f"sqlite:///{folder / 'coordinator.db'}",
        },
    }


def options(folder: Path) -> list[str]:
    return ["--coordinator", str(folder / "coordinator.toml"), "--aggregator", str(folder / "aggregator.toml")]


@pytest.mark.slow
def test_new_processes_on_an_empty_machine_end_with_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    here, there, backup = tmp_path / "here", tmp_path / "there", str(tmp_path / "backup")
    here.mkdir()
    there.mkdir()
    options_of_job = {"gate": str(tmp_path / "gate"), "scale": LARGE}
    job = job_of({"name": "fedel"}, NUM_CLIENTS, NUM_ROUNDS, trainer="gated", options=options_of_job)
    gate = gate_of(job)
    gate.hold(CLIENTS[-1], SAVED)
    gate.hold(CLIENTS[0], LOST)

    async def scenario() -> None:
        async with federation(here, job, NUM_CLIENTS) as made, AsyncExitStack() as stack:
            await made.watch.until(lambda: set(CLIENTS[:-1]) == made.watch.done(SAVED), "two of three are done")
            assert 0 == await asyncio.to_thread(main, ["backup", backup, *options(here)])
            gate.release(CLIENTS[-1], SAVED)
            await made.watch.until(lambda: set(CLIENTS[1:]) == made.watch.done(LOST), "rounds after the backup")
            for process in (made.coordinator, made.aggregator):
                process.kill()
            shutil.rmtree(here / "a")
            (here / "coordinator.db").unlink()
            gate.release(CLIENTS[0], LOST)
            for name, table in settings(made, there).items():
                (there / f"{name}.toml").write_text(config.write(table), encoding="utf-8")
            assert 0 == await asyncio.to_thread(main, ["restore", backup, *options(there)])
            for name, table in settings(made, there).items():
                process = Process(f"fedel_{name}", name, there, table, user_code=REPOSITORY)
                stack.callback(process.kill)
                process.start()
                await process.ready()
            async with watching(made.address, RUN) as watch:
                await watch.finished()
                assert [CLIENTS] * NUM_ROUNDS == watch.counted
            model = await model_of(made.address, RUN, there)
            assert same_bits(simulated(job, NUM_CLIENTS).published, model)

    asyncio.run(scenario())
    trained = {number: gate.times_trained(CLIENTS[1], number) for number in range(NUM_ROUNDS)}
    assert {number: 2 if SAVED < number <= LOST else 1 for number in trained} == trained
