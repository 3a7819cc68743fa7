"""What secure aggregation and noise cost in a real federation: the second table of docs/privacy.md.

    python -m benchmarks.protected_federation

Runs ``fedel run`` for each option and seed: a coordinator, an aggregator and five agents, each a process of
its own on this machine, with the digits that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

NUM_CLIENTS = 5
JOB = """
seed = {seed}
[strategy]
name = "{strategy}"
[workload]
model = "cnn"
data = "digits"
model_options = {{ width = 0.5 }}
[rounds]
num_rounds = {rounds}
min_clients = {clients}
evaluate_every = {rounds}
[work]
num_steps = 10
batch_size = 16
lr = 0.05
[fleet]
slowdowns = {slowdowns}
[fleet.data]
method = "iid"
[protection]
{protection}
"""
NOISE = f"clip_norm = 1.0\nnum_expected = {NUM_CLIENTS}\nnoise_multiplier = "
OPTIONS = {
    "plain": "",
    "secure": "secure = true",
    "noise_multiplier = 0.5": NOISE + "0.5",
}


def run(strategy: str, option: str, num_rounds: int, seed: int) -> dict[str, Any]:
    """One run: its result, the seconds of its rounds, and the CPU seconds of all processes."""
    slowdowns = [1 + index % 4 for index in range(NUM_CLIENTS)]
    text = JOB.format(
        seed=seed,
        strategy=strategy,
        rounds=num_rounds,
        clients=NUM_CLIENTS,
        slowdowns=slowdowns,
        protection=OPTIONS[option],
    )
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text(text, encoding="utf-8")
        begin = _cpu_seconds()
        command = [sys.executable, "-m", "fedel.cli.main", "run", str(job), "--json", "--name", "bench"]
        words = [*command, "--out", folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{strategy}, {option}, seed {seed}: exit code {done.returncode}\n{done.stderr}")
        result = json.loads(done.stdout)
        lines = (Path(folder) / "bench" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
        seconds = np.median([json.loads(line)["latency_seconds"] for line in lines])
        return {**result, "round_seconds": float(seconds), "cpu_seconds": _cpu_seconds() - begin}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--strategies", nargs="+", default=["fedavg", "fedel"])
    parser.add_argument("--only", nargs="*", default=list(OPTIONS))
    arguments = parser.parse_args()
    _say("method", "option", "accuracy by seed", "epsilon", "MB up", "seconds per round", "CPU seconds")
    _say(*["---"] * 7)
    for strategy in arguments.strategies:
        for option in arguments.only:
            runs = [run(strategy, option, arguments.rounds, seed) for seed in arguments.seeds]
            epsilon = runs[0].get("epsilon")
            _say(
                strategy,
                option,
                ", ".join(f"{100 * (each['accuracy'] or 0.0):.1f} %" for each in runs),
                "" if epsilon is None else f"{epsilon:.1f}",
                f"{np.mean([each['bytes_up'] for each in runs]) / 1e6:.2f}",
                f"{np.mean([each['round_seconds'] for each in runs]):.1f}",
                f"{np.mean([each['cpu_seconds'] for each in runs]):.0f}",
            )


def _say(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
