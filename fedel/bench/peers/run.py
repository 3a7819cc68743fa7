"""Runs other systems under a load: starts their processes, waits for their rounds, ends them.

Every driver writes a line into a file at the end of each round. What counts as server:

* ``flower-grpc``: the process of ``start_server``;
* ``flower-superlink``: SuperLink and everything it starts, such as the process of the ServerApp;
* ``nvflare``: the process of FLARE's simulator, without the workers that are its clients. The simulator has no
  TLS and runs the server's job in the same process: nothing of FLARE costs less.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedel.bench.follow import LOOK_SECONDS, follow, last_line
from fedel.bench.load import Load, Outcome
from fedel.bench.peers import flower_app, flower_grpc, nvflare_job
from fedel.bench.peers.venvs import FLOWER, NVFLARE, Package
from fedel.bench.proc import Watch, command, family
from fedel.errors import ServiceError

_START_SECONDS = 120.0
MARK = "FEDEL_BENCH_FOLDER"
"""Environment variable of all processes of a measurement."""
WORKER = "simulator_worker"
"""Occurs in the command line of FLARE's clients."""


def run_flower_grpc(load: Load, folder: Path) -> Outcome:
    port = free_port()
    config = _config(load, folder, address=f"127.0.0.1:{port}")
    with ExitStack() as stack:
        start = _starter(stack, folder, FLOWER)
        server = start("server", *flower_grpc_command("server", config))
        _until_it_listens(port, folder)
        clients = start("clients", *flower_grpc_command("clients", config))
        return follow(load, folder, Watch((server,), ()), (server, clients), lambda: family([clients])[1:])


def flower_grpc_command(kind: str, config: Path) -> list[str]:
    return [FLOWER.program(), flower_grpc.__file__, kind, str(config)]


def run_flower_superlink(load: Load, folder: Path) -> Outcome:
    config, port = _config(load, folder), free_port()
    app, home = folder / "app", folder / "flwr"
    make_flower_app(app, home, config, port)
    with ExitStack() as stack:
        start = _starter(stack, folder, FLOWER, {"FLWR_HOME": str(home)})
        server = start("server", *superlink_command(port))
        _until_it_listens(port, folder)
        nodes = [start(f"node-{i}", *supernode_command(port, free_port())) for i in range(load.num_clients)]
        _submit(app, folder, {"FLWR_HOME": str(home)})
        return follow(load, folder, Watch((server,), tuple(nodes)), (server, *nodes), lambda: nodes)


def _submit(app: Path, folder: Path, more: Mapping[str, str]) -> None:
    with (folder / "submit.log").open("wb") as log:
        words = [FLOWER.program("flwr"), "run", str(app), "bench"]
        done = subprocess.run(
            words,
            cwd=folder,
            env=_environment(FLOWER, folder, more),
            stdout=log,
            stderr=log,
            timeout=_START_SECONDS,
        )
    if done.returncode:
        raise ServiceError(f"flwr run: {(folder / 'submit.log').read_text(encoding='utf-8')[-300:]}")


def _until_it_listens(port: int, folder: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise ServiceError(f"it did not listen in time; {last_line(folder)}") from None
            time.sleep(LOOK_SECONDS)


def make_flower_app(app: Path, home: Path, config: Path, port: int) -> None:
    """What ``flwr run`` packs and sends, and the address it sends it to."""
    app.mkdir()
    home.mkdir()
    (app / "pyproject.toml").write_text(flower_app.PYPROJECT.format(config=config), encoding="utf-8")
    shutil.copyfile(flower_app.__file__, app / "bench_app.py")
    address = (
        f'[superlink]\ndefault = "bench"\n\n[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    (home / "config.toml").write_text(address, encoding="utf-8")


def superlink_command(port: int) -> list[str]:
    program = FLOWER.program("flower-superlink")
    return [program, "--insecure", "--port", str(port), "--disable-runtime-dependency-installation"]


def supernode_command(port: int, own_port: int) -> list[str]:
    program = FLOWER.program("flower-supernode")
    return [program, "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(own_port)]


def run_nvflare(load: Load, folder: Path) -> Outcome:
    config = _config(load, folder)
    with ExitStack() as stack:
        job = _starter(stack, folder, NVFLARE)("server", *nvflare_command(config))
        watch = Watch((job,), (), without=WORKER)
        return follow(load, folder, watch, (job,), lambda: _workers(job))


def nvflare_command(config: Path) -> list[str]:
    return [NVFLARE.program(), nvflare_job.__file__, "job", str(config)]


def _workers(job: int) -> list[int]:
    return [pid for pid in family([job]) if WORKER in command(pid)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _config(load: Load, folder: Path, **more: str) -> Path:
    file = folder / "config.json"
    table = {
        "shapes": load.workload.shapes,
        "clients": load.num_clients,
        "rounds": load.num_rounds,
        "rounds_file": str(folder / "rounds"),
        "folder": str(folder),
    }
    file.write_text(json.dumps(table | more), encoding="utf-8")
    return file


Start = Callable[..., int]


def _environment(package: Package, folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Without our own modules, and with the programs of the package first."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = f"{package.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    fixed = {"PATH": path, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    return {**kept, **fixed, **more, MARK: str(folder)}


def _starter(stack: ExitStack, folder: Path, package: Package, more: Mapping[str, str] | None = None) -> Start:
    """A function that starts a process with a log of its own, and returns its id."""
    environment = _environment(package, folder, more or {})
    stack.callback(end_all, folder)

    def start(name: str, *words: str) -> int:
        return stack.enter_context(_process(folder, f"{name}.log", words, environment)).pid

    return start


@contextmanager
def _process(
    folder: Path, log: str, words: tuple[str, ...], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / log).open("wb") as output:
        started = subprocess.Popen(
            words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def end_all(folder: Path) -> None:
    """End every process of this measurement; what a killed process had started would go on without it."""
    mark = f"{MARK}={folder}\0".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes() + b"\0":
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue
