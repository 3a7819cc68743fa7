"""Agents with bad links: does the run finish, and how long does it take?

    sudo python benchmarks/links.py
    sudo python benchmarks/links.py --mbit 5 --delay-ms 300 --loss 0.05 --outage 120 --json links.json

A real coordinator and aggregator in one network namespace, each agent as a process in its own namespace, with
mutual TLS. The links between them are made by ``tunnel.py``. The link of the last agent is cut for a minute
while it uploads. The trainer is the fake one of the tests, so the seconds are those of the links. Needs root,
and changes nothing outside its own namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.tunnel import Link, Shape, ip  # noqa: E402
from fedel import config  # noqa: E402
from fedel.desk.submit import create, follow  # noqa: E402
from fedel.records import RoundRecord  # noqa: E402
from fedel.security.authority import Authority  # noqa: E402
from fedel.security.identity import Identity  # noqa: E402
from fedel.security.tls import Tls  # noqa: E402
from fedel.v1 import coordinator_pb2 as pb  # noqa: E402
from tests.federation.processes import Process  # noqa: E402
from tests.federation.support import job_of, until  # noqa: E402
from tests.federation.trainers import spec_of  # noqa: E402
from tests.strategies.fakes import initial_model  # noqa: E402

RUN, HUB = "links", "fedel-hub"
HOST = "10.88.0.1"
"""Address of the servers, in the namespace of the hub."""
LONGEST_SECONDS = 1500.0


@contextmanager
def namespaces(names: Sequence[str], congestion: str) -> Iterator[None]:
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            if congestion:
                ip("netns", "exec", name, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={congestion}")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


class Certificates:
    def __init__(self, folder: Path) -> None:
        self._folder, self._authority = folder, Authority.create(folder / "ca")

    def tls(self, role: str, name: str) -> Tls:
        hosts = (HOST,) if role == "service" else ()
        self._authority.issue(self._folder / name, Identity(role, name), hosts)
        return Tls(dir=str(self._folder / name))


@contextmanager
def agent(namespace: str, folder: Path, name: str, settings: dict[str, Any]) -> Iterator[None]:
    """A process in its namespace."""
    file = folder / f"{name}.toml"
    file.write_text(config.write(settings), encoding="utf-8")
    command = ("ip", "netns", "exec", namespace, sys.executable, "-m", "fedel_edge", "--config", str(file))
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Inside the namespace of the hub: everything until the end of the run."""
    ip("addr", "add", HOST, "dev", "lo")
    shape = Shape(options.mbit, options.delay_ms / 1e3, options.loss)
    certificates = Certificates(folder / "certs")
    with ExitStack() as stack:
        coordinator, http = await start_servers(folder, certificates, stack)
        links = {}
        for index, name in enumerate(names(options.agents)):
            links[name] = Link(
                f"fedel{index}", f"fedel-{name}", f"10.88.{index + 1}.1", f"10.88.{index + 1}.2", shape, index
            )
            stack.callback(links[name].close)
        ways = {name: await _round_trip(f"fedel-{name}") for name in links}
        operator, job = certificates.tls("operator", "ada"), _job(options)
        spec = spec_of(options.scale)
        await create(coordinator, RUN, job, spec, initial_model(spec), operator)
        for index, name in enumerate(links):
            data = {"index": index, "of": options.agents}
            settings = {"coordinator": coordinator, "name": name, "state_dir": str(folder / name), "data": data}
            settings["tls"] = {"dir": certificates.tls("agent", name).dir}
            settings["log_level"], settings["code"] = "DEBUG", {"allow": ["tests"]}
            stack.enter_context(agent(f"fedel-{name}", folder, name, settings))
        seen = _Seen()
        following = asyncio.ensure_future(follow(coordinator, RUN, seen.take, operator))
        outage = asyncio.ensure_future(_outage(seen, links, options.outage))
        begin = time.monotonic()
        try:
            last = await asyncio.wait_for(following, LONGEST_SECONDS)
        finally:
            outage.cancel()
        uploads = await asyncio.to_thread(_uploads, http)
        seconds = time.monotonic() - begin
        retransmitted = {"servers": _retransmitted(HUB)} | {n: _retransmitted(f"fedel-{n}") for n in links}
    return {
        "finished": last.phase == pb.RUN_PHASE_FINISHED,
        "seconds": seconds,
        "congestion": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "model_bytes": sum(4 * t.size for t in spec.tensors),
        "outage": seen.outage,
        "rounds": [
            {
                "round": record.round,
                "latency_seconds": record.latency_seconds,
                "num_updates": record.num_updates,
                "bytes_up": record.bytes_up,
                "bytes_down": record.bytes_down,
            }
            for record in seen.records
        ],
        "uploads": uploads,
        "clients": {
            name: {
                "round_trip_ms": ways[name],
                "retransmitted_segments": retransmitted[name],
                "up_bytes": link.up.num_bytes,
                "down_bytes": link.down.num_bytes,
                "packets": link.up.num_packets + link.down.num_packets,
                "lost_packets": link.up.num_lost + link.down.num_lost,
                **_broken(folder / f"{name}.log"),
            }
            for name, link in links.items()
        },
        "servers_retransmitted_segments": retransmitted["servers"],
    }


def names(num_agents: int) -> list[str]:
    return [f"client-{index}" for index in range(num_agents)]


def _job(options: argparse.Namespace) -> Any:
    return job_of(
        {"name": "fedel"},
        options.agents,
        options.rounds,
        options={"scale": options.scale},
        deadline_floor_seconds=options.deadline,
    )


async def start_servers(folder: Path, certificates: Certificates, stack: ExitStack) -> tuple[str, str]:
    """Addresses of the coordinator, and of the aggregator's metrics."""

    async def started(name: str, **settings: Any) -> str:
        tls = {"dir": certificates.tls("service", name).dir}
        plain = {"listen": f"{HOST}:0", "port_file": str(folder / f"{name}.address"), "tls": tls}
        server = Process(f"fedel_{name}", name, folder, plain | settings)
        stack.callback(server.kill)
        server.start()
        return await server.address()

    http = folder / "http.address"
    shown = {"http": "127.0.0.1:0", "http_port_file": str(http)}
    bulk = await started("aggregator", data_dir=str(folder / "models"), **shown)
    database = f"sqlite:///{folder / 'coordinator.db'}"
    coordinator = await started("coordinator", aggregators=[bulk], database_url=database)
    await until(http.exists, "the aggregator's metrics")
    return coordinator, http.read_text()


class _Seen:
    """What was seen while following the run."""

    def __init__(self) -> None:
        self.status = pb.RunStatus()
        self.records: list[RoundRecord] = []
        self.outage: dict[str, Any] = {}

    def take(self, status: pb.RunStatus) -> None:
        self.status = status
        self.records += [RoundRecord.from_json(text) for text in status.rounds_json]

    def uploading(self, client: str) -> bool:
        return any(c.client == client and c.phase == "upload" for c in self.status.clients)


async def _outage(seen: _Seen, links: dict[str, Link], seconds: float) -> None:
    """Cut the link of the last client for ``seconds``, as soon as it uploads in the second round or later."""
    name, link = list(links.items())[-1]
    while not (seen.records and seen.uploading(name)):
        await asyncio.sleep(0.05)
    seen.outage = {"client": name, "round": len(seen.records), "seconds": seconds}
    print(f"{name} uploads in round {len(seen.records)}: its link is cut for {seconds:g} s", flush=True)
    link.cut(True)
    await asyncio.sleep(seconds)
    link.cut(False)
    print("the link is back", flush=True)


async def _round_trip(namespace: str) -> float:
    """Median round-trip milliseconds, from connections to a closed port, which are refused at once."""
    code = (
        "import socket, statistics, time\n"
        "times = []\n"
        "for _ in range(9):\n"
        "    begin = time.monotonic()\n"
        f"    socket.socket().connect_ex(('{HOST}', 9))\n"
        "    times.append(time.monotonic() - begin)\n"
        "print(statistics.median(times) * 1e3)\n"
    )
    command = ("ip", "netns", "exec", namespace, sys.executable, "-c", code)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    return float(told)


def _retransmitted(namespace: str) -> int:
    """TCP segments sent again from this namespace."""
    command = ["ip", "netns", "exec", namespace, "cat", "/proc/net/snmp"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    words, values = (line.split() for line in told.splitlines() if line.startswith("Tcp:"))
    return int(values[words.index("RetransSegs")])


def _uploads(http: str) -> dict[str, int]:
    text = urlopen(f"http://{http}/metrics").read().decode()
    found = re.findall(r'^fedel_uploads_total\{outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {outcome: int(float(count)) for outcome, count in found}


def _broken(log: Path) -> dict[str, int]:
    """How often the agent had to retry something."""
    text = log.read_text(encoding="utf-8")
    return {
        "uploads_resumed": len(re.findall(r"upload of run \S+ broke", text)),
        "downloads_repeated": len(re.findall(r"download of run \S+ broke", text)),
        "failed_dials": text.count("no session with the coordinator"),
    }


def show(found: dict[str, Any], options: argparse.Namespace) -> None:
    seconds = [record["latency_seconds"] for record in found["rounds"]]
    ended = "finished" if found["finished"] else "NOT FINISHED"
    print(
        f"{ended}: {len(seconds)} rounds in {found['seconds']:.0f} s, model {found['model_bytes'] / 1e6:.2f} MB"
    )
    shape = f"{options.mbit:g} Mbit/s, {options.delay_ms:g} ms each way, {options.loss:.0%} loss"
    print(f"links: {shape}; TCP with {found['congestion']}")
    print(f"outage: {found['outage']}")
    print(
        "seconds per round: "
        + ", ".join(f"{s:.1f}" for s in seconds)
        + f"; median {statistics.median(seconds):.1f}"
    )
    print("updates per round: " + ", ".join(str(record["num_updates"]) for record in found["rounds"]))
    print(f"uploads at the aggregator: {found['uploads']}; segments that servers sent again: "
          f"{found['servers_retransmitted_segments']}\n")  # fmt: skip
    columns = list(next(iter(found["clients"].values())))
    print(
        "| client | " + " | ".join(c.replace("_", " ") for c in columns) + " |\n|---|" + "---|" * len(columns)
    )
    for name, row in found["clients"].items():
        cells = (f"{v:.0f}" if isinstance(v, float) else f"{v:,}" for v in row.values())
        print(f"| {name} | " + " | ".join(cells) + " |")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--delay-ms", type=float, default=80.0, help="one way")
    parser.add_argument("--loss", type=float, default=0.02, help="share of lost packets, each way")
    parser.add_argument(
        "--congestion",
        default="",
        help="TCP congestion control: reno, cubic, bbr (default: that of this machine)",
    )
    parser.add_argument("--outage", type=float, default=60.0, help="seconds for which one link is cut")
    parser.add_argument(
        "--deadline", type=float, default=240.0, help="seconds that a round waits for all clients"
    )
    parser.add_argument("--scale", type=int, default=36, help="side length of the fake model; 36 gives 2 MB")
    parser.add_argument("--keep", type=Path, help="folder for logs (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    if not options.inside:
        if os.getuid() != 0:
            parser.error("network namespaces need root: sudo python benchmarks/links.py")
        with namespaces([HUB, *(f"fedel-{name}" for name in names(options.agents))], options.congestion):
            inside = ("ip", "netns", "exec", HUB, sys.executable, __file__, "--inside", *words)
            return subprocess.run(inside, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        found = asyncio.run(measure(options, folder))
    show(found, options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if found["finished"] else 1


if __name__ == "__main__":
    sys.exit(main())
