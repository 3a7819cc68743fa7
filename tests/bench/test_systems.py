"""The section of the systems: a real small run of ours and of the floor, and how the peers are started."""

from __future__ import annotations

import json
import py_compile
import subprocess
import sys
from dataclasses import replace

import pytest

from fedel.bench import follow, shown
from fedel.bench.load import Load
from fedel.bench.peers import flower_app, flower_grpc, nvflare_job, run
from fedel.bench.peers.venvs import FLOWER, NVFLARE, Package
from fedel.bench.proc import Watch
from fedel.bench.section import Options
from fedel.bench.sections import systems
from fedel.bench.workloads import workload
from fedel.errors import ConfigError, ServiceError

LOAD = Load(workload("XS"), 2, 2, 120.0)
GOOD = {
    "cpu_seconds": 1.0,
    "least_cpu_seconds": 0.9,
    "seconds": 2.0,
    "loopback_bytes": 1e9,
    "server_peak_bytes": 3e8,
    "client_peak_bytes": 1e8,
}


def silent(_line):
    pass


@pytest.mark.parametrize(
    "name", ["fedel", "fedel-mtls", "fedel-selected", "fedel-two", "floor", "floor-storing"]
)
def test_measures_our_own_servers(tmp_path, name):
    row = systems.one(name, LOAD, tmp_path)
    assert "error" not in row, row
    assert 1 == row["rounds"]
    assert 0 < row["seconds"] < 60
    assert row["server_peak_bytes"] > 10_000_000
    assert row["loopback_bytes"] >= 0  # rounds of so small a model are over between two looks
    if name.startswith("fedel"):
        assert 10_000_000 < row["client_peak_bytes"] < 300_000_000
        whole = LOAD.num_clients * LOAD.workload.num_bytes
        assert 0 < row["bytes_up"] <= whole
        assert (row["bytes_up"] < 0.8 * whole) is (name == "fedel-selected")
        assert 0 < row["bytes_down"] <= whole
    assert [] == list(tmp_path.iterdir())


def test_yields_a_row_for_each_system_and_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(systems, "one", lambda name, load, folder: dict(GOOD))
    options = Options(sizes=("S", "M"), clients=(2,), systems=("fedel", "floor"), turns=2, folder=tmp_path)
    rows = list(systems.measure(options, silent))
    order = [(row["size"], row["turn"], row["system"]) for row in rows]
    turns = [(turn, name) for turn in (0, 1) for name in ("fedel", "floor")]
    assert [(size, *turn) for size in ("S", "M") for turn in turns] == order
    assert [] == list(systems.measure(replace(options, rows=rows), silent))
    with pytest.raises(ConfigError, match="no system is named 'other'"):
        list(systems.measure(replace(options, systems=("other",)), silent))


def test_a_system_that_fails_is_a_row(tmp_path, monkeypatch):
    def fail(load, folder):
        raise ServiceError("after 1 of 4 rounds:\nserver: out of memory")

    monkeypatch.setitem(systems.SYSTEMS, "floor", fail)
    assert {"error": "after 1 of 4 rounds: server: out of memory"} == systems.one("floor", LOAD, tmp_path)


def test_what_does_not_fit_into_memory_is_not_tried(tmp_path):
    load = Load(workload("L"), 10_000, 2, 1.0)
    assert "GB of memory" in systems._objection("flower-grpc", load)
    assert "" == systems._objection("fedel", load)


def test_tables_goals_and_ratios():
    def row(system, size="M", clients=10, turn=0, **changed):
        return {"system": system, "size": size, "clients": clients, "turn": turn, **GOOD, **changed}

    rows = [
        row("fedel", cpu_seconds=2.0, busiest_cpu_seconds=1.8),
        row("fedel", cpu_seconds=2.4, busiest_cpu_seconds=1.8, turn=1),
        row("fedel-two", cpu_seconds=2.6, busiest_cpu_seconds=1.0),
        row("floor", cpu_seconds=1.1),
        row("flower-grpc", cpu_seconds=22.0, server_peak_bytes=6e8),
        {"system": "nvflare", "size": "M", "clients": 10, "turn": 0, "error": "it broke"},
        row("fedel", clients=200, server_peak_bytes=6e8, close_seconds=0.1),
    ]
    lines = "\n".join(shown.show(rows))
    assert "| FedEL | 2.20 | 0.90 | 2.00 | 2.0 | 300 |" in lines
    assert f"* NVIDIA FLARE {NVFLARE.version}: it broke" in lines
    goals = {goal.question: goal for goal in shown.goals(rows)}
    flower = f"Flower {FLOWER.version}, gRPC server"
    assert ("10.0", True) == _said(goals[f"Server CPU seconds, M, 10 clients: {flower} / FedEL"])
    assert ("2.0", False) == _said(goals[f"Server memory, M, 10 clients: {flower} / FedEL"])
    assert ("2.00", False) == _said(goals["Server CPU seconds, M, 10 clients: FedEL / floor"])
    assert ("2.00", False) == _said(goals["Server memory, M: 200 clients / 10 clients"])
    assert ("0.05", True) == _said(goals["Seconds of the commit / of the round, M, 200 clients"])
    assert ("1.80", True) == _said(goals[f"{shown.TWICE}, M, 10 clients"])
    assert 1.0 == shown.ratios(rows)["FedEL, M, 10 clients: CPU / floor"]
    assert {"M"} == shown.pictures(rows).keys()


def _said(goal):
    return goal.measured, goal.met


@pytest.mark.parametrize("driver", [flower_app, flower_grpc, nvflare_job])
def test_drivers_compile_and_do_not_need_us(tmp_path, driver):
    py_compile.compile(driver.__file__, cfile=str(tmp_path / "made.pyc"), doraise=True)
    alone = f"import runpy, sys; runpy.run_path({driver.__file__!r}); sys.exit('fedel' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-I", "-c", alone], check=False).returncode


def test_command_lines_of_peers(tmp_path):
    config = tmp_path / "config.json"
    assert [FLOWER.program(), flower_grpc.__file__, "server", str(config)] == run.flower_grpc_command(
        "server", config
    )
    assert [NVFLARE.program(), nvflare_job.__file__, "job", str(config)] == run.nvflare_command(config)
    assert ["--insecure", "--port", "17"] == run.superlink_command(17)[1:4]
    assert ["--superlink", "127.0.0.1:17", "--port", "18"] == run.supernode_command(17, 18)[2:]
    assert FLOWER.program("flower-superlink").endswith(
        f"/fedel/bench/flwr-{FLOWER.version}/bin/flower-superlink"
    )


def test_the_app_for_flower(tmp_path):
    config = tmp_path / "config.json"
    run.make_flower_app(tmp_path / "app", tmp_path / "home", config, 17)
    text = (tmp_path / "app" / "pyproject.toml").read_text()
    assert f'config-file = "{config}"' in text
    assert 'serverapp = "bench_app:server"' in text
    assert 'address = "127.0.0.1:17"' in (tmp_path / "home" / "config.toml").read_text()
    assert (tmp_path / "app" / "bench_app.py").exists()


def test_a_package_that_cannot_be_installed_says_why():
    package = Package("fedel-no-such-package", "1")
    with pytest.raises(ServiceError, match=r"package 1 was not installed: ERROR: No matching distribution"):
        package._run(sys.executable, "-m", "pip", "install", "--no-index", "fedel-no-such-package==1")


def test_a_package_that_is_there_is_not_installed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package = Package("flwr", "0")
    package.folder.mkdir(parents=True)
    (package.folder / ".ready").touch()
    monkeypatch.setattr(Package, "_run", lambda *_: pytest.fail("it is there"))
    package.install(silent)
    assert str(tmp_path / "fedel" / "bench" / "flwr-0" / "bin" / "python") == package.program()


def test_follows_rounds_in_a_file(tmp_path):
    """The driver of a peer writes a line per round; one that ends too early is quoted."""
    driver = "open('rounds', 'a').write('1\\n' * {}); print('that is all')"
    for number, good in ((2, True), (1, False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with (folder / "server.log").open("w") as log:
            process = subprocess.Popen([sys.executable, "-c", driver.format(number)], cwd=folder, stdout=log)
            process.wait()
        watch = Watch((process.pid,))
        if good:
            assert 2 == len(follow.follow(LOAD, folder, watch, [process.pid]).watch.marks)
        else:
            with pytest.raises(ServiceError, match="after 1 of 2 rounds: server: that is all"):
                follow.follow(LOAD, folder, watch, [process.pid])


def test_ends_all_processes_of_a_measurement(tmp_path):
    """Also those whose parent is gone."""
    child = "import sys; print(1, flush=True); sys.stdin.read()"
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    words = [sys.executable, "-c", starts]
    environment = {run.MARK: str(tmp_path)}
    with subprocess.Popen(
        words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert "1\n" == parent.stdout.readline()
        parent.wait()
        run.end_all(tmp_path)
        assert "" == parent.stdout.read()  # its end: nobody has the pipe open any more


def test_workloads_have_their_sizes():
    sizes = {name: workload(name).num_bytes / 1e6 for name in ("S", "M", "L")}
    assert sizes == pytest.approx({"S": 1.0, "M": 61.4, "L": 553.9}, rel=0.05)
    assert json.dumps(workload("L").shapes)
