"""Fleets in which four of ten devices are 10 or 20 times slower: the table of docs/extreme-fleets.md.

    python -m benchmarks.extreme

Simulates ten devices on the digits that come with scikit-learn. All runs of a seed share the split of the data
and the devices, and get the same virtual time. A round has so few steps that on a device 20 times slower not
even one step of the last block fits T_th. Times are whole steps of a profile measured once on this machine;
transfers take none.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from fedel.records import RoundRecord
from fedel.simulation.job import SimulationConfig
from fedel.simulation.start import play_all, session

NUM_STEPS = 4
AT_ONCE = {"deadline_factor": 1.1}
WEIGH = {**AT_ONCE, "late": "weigh", "max_staleness": 25}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg, waits for all": ("fedavg", {"deadline_factor": 1e3}),
    "FedAvg, late ones are lost": ("fedavg", AT_ONCE),
    "FedAvg, late ones are weighed": ("fedavg", WEIGH),
    "FedEL, waits for all": ("fedel", {"deadline_factor": 1e3}),
    "FedEL, late ones are weighed": ("fedel", WEIGH),
}


def play(
    method: str, rounds: dict[str, Any], slowness: int, seed: int, profile: Path, alpha: float
) -> list[RoundRecord]:
    """The rounds of one run. The timings of the base device are measured once, for the first run."""
    table: dict[str, Any] = {
        "seed": seed,
        "scope": "train",
        "strategy": {"name": method},
        "workload": {"model": "cnn", "data": "digits"},
        "work": {"num_steps": NUM_STEPS, "batch_size": 16, "lr": 0.02},
        "partition": {"method": "dirichlet", "num_clients": 10, "alpha": alpha},
        "fleet": {
            "base": "measured",
            "counts": {"orin": 6, "slow": 4},
            "types": {"slow": {"slowness": float(slowness)}},
        },
        "rounds": {"num_rounds": 10**6, "evaluate_every": 10**6, **rounds},
    }
    records: list[RoundRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if profile.exists():
            run.mkdir()
            (run / profile.name).write_bytes(profile.read_bytes())
        with session(SimulationConfig.parse(table), run, executor="serial") as ready:
            play_all(ready, records.append)
        profile.write_bytes((run / profile.name).read_bytes())
    return records


def row(runs: list[list[RoundRecord]]) -> list[str]:
    accuracies = [100 * (records[-1].accuracy or 0.0) for records in runs]
    every = [record for records in runs for record in records]
    t_th = every[0].budget_seconds * NUM_STEPS
    seconds = [record.latency_seconds / t_th for record in every]
    updates, tasks = sum(r.num_updates for r in every), sum(r.num_tasks for r in every)
    slow = [entry.staleness for record in every for entry in record.clients if entry.device_type == "slow"]
    return [
        f"{statistics.fmean(accuracies):.1f} ({min(accuracies):.1f} to {max(accuracies):.1f})",
        f"{len(every) / len(runs):.0f}",
        f"{statistics.fmean(seconds):.2f} / {max(seconds):.2f}",
        f"{100 * updates / tasks:.0f} %",
        f"{100 * len(slow) / updates:.0f} %",
        f"{statistics.fmean(slow):.1f}" if slow else "-",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24, help="virtual time, in multiples of T_th")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--slowness", type=int, nargs="+", default=[20, 10])
    parser.add_argument("--alpha", type=float, default=0.3)
    parser.add_argument("--only", nargs="+", default=list(POLICIES))
    arguments = parser.parse_args()
    _say("fleet", "policy", "accuracy", "rounds", "seconds / T_th, mean / most", "tasks that counted",
         "updates of slow devices", "rounds late, slow devices")  # fmt: skip
    _say(*["---"] * 8)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        first = play("fedavg", {"num_rounds": 1}, 1, 1, profile, arguments.alpha)
        seconds = first[0].budget_seconds * NUM_STEPS * arguments.rounds
        for slowness in arguments.slowness:
            for name in arguments.only:
                method, rounds = POLICIES[name]
                limit = {**rounds, "max_seconds": seconds}
                runs = [play(method, limit, slowness, s, profile, arguments.alpha) for s in arguments.seeds]
                _say(f"1:{slowness}", name, *row(runs))


def _say(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
