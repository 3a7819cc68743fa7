"""T_th of the whole round over slow links: FedEL with and without the scope ``round``, and FedAvg.

    sudo python benchmarks/round_budget.py
    sudo python benchmarks/round_budget.py --up-mbit 5 --down-mbit 20 --rounds 12 --json round_budget.json

The job of ``fedel demo`` on the same servers, one method after the other. Each agent is a process in a network
namespace of its own; ``tunnel.py`` makes the links. Real training, real clocks. The first two rounds of each
run, in which links and devices are still unknown, do not count. Needs root, and changes nothing outside its own
namespaces. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.links import HOST, HUB, Certificates, agent, namespaces, start_servers  # noqa: E402
from benchmarks.tunnel import Link, Shape, ip  # noqa: E402
from fedel.cli.demo import JOB  # noqa: E402
from fedel.desk.local import read_job  # noqa: E402
from fedel.desk.submit import create, follow  # noqa: E402
from fedel.job import RunConfig  # noqa: E402
from fedel.records import RoundRecord  # noqa: E402
from fedel.training.factory import initial_model  # noqa: E402
from fedel.v1 import coordinator_pb2 as pb  # noqa: E402

METHODS: dict[str, dict[str, Any]] = {
    "fedel, scope round": {"name": "fedel", "budget_scope": "round"},
    "fedel, scope train": {"name": "fedel", "budget_scope": "train"},
    "fedavg": {"name": "fedavg"},
}
SLOWDOWNS = (1, 2, 3, 4)
SETTLED = 2
"""Rounds after which links and devices are known."""


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[RoundRecord]]:
    """Inside the namespace of the hub."""
    ip("addr", "add", HOST, "dev", "lo")
    delay = options.delay_ms / 1e3
    up, down = Shape(options.up_mbit, delay, 0.0), Shape(options.down_mbit, delay, 0.0)
    certificates, found = Certificates(folder / "certs"), {}
    with ExitStack() as stack:
        coordinator, _ = await start_servers(folder, certificates, stack)
        for index, slowdown in enumerate(SLOWDOWNS):
            name, near = f"client-{index}", f"10.88.{index + 1}.1"
            link = Link(f"fedel{index}", f"fedel-{name}", near, f"10.88.{index + 1}.2", up, index, down)
            stack.callback(link.close)
            settings = {
                "coordinator": coordinator,
                "name": name,
                "state_dir": str(folder / name),
                "slowdown": float(slowdown),
                "threads": 1,
                "data": {"index": index, "of": len(SLOWDOWNS), "method": "iid"},
                "evaluate": index == 0,
                "tls": {"dir": certificates.tls("agent", name).dir},
            }
            stack.enter_context(agent(f"fedel-{name}", folder, name, settings))
        operator = certificates.tls("operator", "ada")
        for number, (label, strategy) in enumerate(METHODS.items()):
            job = _job(options, strategy)
            spec, tensors = await asyncio.to_thread(initial_model, job)
            await create(coordinator, f"run-{number}", job, spec, tensors, operator)
            records: list[RoundRecord] = []

            def take(status: pb.RunStatus, records: list[RoundRecord] = records) -> None:
                records += [RoundRecord.from_json(text) for text in status.rounds_json]

            last = await follow(coordinator, f"run-{number}", take, operator)
            if last.phase != pb.RUN_PHASE_FINISHED:
                raise SystemExit(f"{label} did not finish: {last.message}")
            found[label] = records
            show(label, records)
    return found


def _job(options: argparse.Namespace, strategy: dict[str, Any]) -> RunConfig:
    job, _ = read_job(JOB, [])
    rounds = replace(job.rounds, num_rounds=options.rounds, evaluate_every=0)
    return replace(job, strategy=strategy, rounds=rounds)


def show(label: str, records: Sequence[RoundRecord]) -> None:
    """Seconds are those of rounds and clients; T_th is that of each round."""
    settled = records[SETTLED:]
    budgets = [record.clients[0].budget_seconds for record in settled]
    ratios = [r.latency_seconds / t_th for r, t_th in zip(settled, budgets, strict=True)]
    away = [abs(deviation) for record in settled for deviation in record.deviations()]
    clients = sum(len(record.clients) for record in settled)
    up, down = (sum(getattr(r, f"bytes_{way}") for r in settled) / clients / 1e3 for way in ("up", "down"))
    transfers = [
        c.phases.get("download", 0.0) + c.phases.get("upload", 0.0) for r in settled for c in r.clients
    ]
    print(
        f"{label}: T_th {statistics.median(budgets):.2f} s; a round takes {statistics.median(ratios):.2f} T_th"
        f" in the median, {max(ratios):.2f} at the most; clients are {statistics.median(away):.1%} away from"
        f" T_th in the median, {max(away):.1%} at the most; transfers {statistics.fmean(transfers):.2f} s,"
        f" {up:.0f} kB up, {down:.0f} kB down per client and round",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--up-mbit", type=float, default=20.0)
    parser.add_argument("--down-mbit", type=float, default=50.0)
    parser.add_argument("--delay-ms", type=float, default=10.0, help="one way")
    parser.add_argument(
        "--congestion",
        choices=("reno", "cubic", "bbr"),
        default="reno",
        help="TCP congestion control of all ends; bbr holds back for 0.2 s every 10 s (default: reno)",
    )
    parser.add_argument("--json", type=Path, help="also write the records to this file")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    if not options.inside:
        if os.getuid() != 0:
            parser.error("network namespaces need root: sudo python benchmarks/round_budget.py")
        names = [HUB, *(f"fedel-client-{index}" for index in range(len(SLOWDOWNS)))]
        with namespaces(names, options.congestion):
            inside = ("ip", "netns", "exec", HUB, sys.executable, __file__, "--inside", *words)
            return subprocess.run(inside, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    with tempfile.TemporaryDirectory() as temporary:
        found = asyncio.run(measure(options, Path(temporary)))
    if options.json:
        options.json.write_text(json.dumps({k: [json.loads(r.to_json()) for r in v] for k, v in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
