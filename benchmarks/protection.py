"""What each option of ``[protection]`` costs, and what it is good for: the tables of docs/privacy.md.

    python -m benchmarks.protection

Simulates FedEL on the digits that come with scikit-learn, without and with one client among 30 that lies: it
sends 50 times its change, with the sign turned.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedel.experiments.stats import estimate
from fedel.records import RunResult
from fedel.simulation.job import SimulationConfig
from fedel.simulation.start import play_all, session
from fedel.simulation.workload import TorchWorkload
from fedel.strategies.base import WrappedTrainer
from fedel.training.trainer import TorchTrainer
from fedel.types import Patch, Tensors, Trained, TrainSpec

NUM_CLIENTS = 30
JOB: dict[str, Any] = {
    "seed": 1,
    "strategy": {"name": "fedel"},
    "workload": {"model": "cnn", "data": "digits", "model_options": {"width": 0.5}},
    "work": {"num_steps": 10, "batch_size": 16, "lr": 0.05},
    "partition": {"method": "iid", "num_clients": NUM_CLIENTS},
    "fleet": {"base": "measured"},
}
CLIP = {"clip_norm": 1.0}
NOISE = {**CLIP, "num_expected": NUM_CLIENTS}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_norm = 1": CLIP,
    "trimmed_mean, trim = 0.1": {"fold": "trimmed_mean"},
    "median": {"fold": "median"},
    "noise_multiplier = 0.1": {**NOISE, "noise_multiplier": 0.1},
    "noise_multiplier = 0.5": {**NOISE, "noise_multiplier": 0.5},
    "noise_multiplier = 2": {**NOISE, "noise_multiplier": 2.0},
    "secure": {"secure": True},
}
ATTACKED = tuple(name for name in OPTIONS if "noise" not in name and name != "secure")
SCALE = 50.0


class _Liar(WrappedTrainer):
    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        trained = super().train(model, train_spec)
        turned = {name: Patch(_turned(model[name], patch.values)) for name, patch in trained.patches.items()}
        return Trained(**{**vars(trained), "patches": turned})


def _turned(old: Any, new: Any) -> Any:
    return (old - SCALE * np.subtract(new, old, dtype=np.float64)).astype(np.float32)


class _WithLiar(TorchWorkload):
    def trainer(self, client: str) -> TorchTrainer:
        trainer = super().trainer(client)
        return _Liar(trainer) if client == min(self._parts) else trainer  # type: ignore[return-value]


def play(folder: Path, protection: dict[str, Any], num_rounds: int, seed: int, with_liar: bool) -> RunResult:
    rounds = {"num_rounds": num_rounds, "evaluate_every": num_rounds}
    job = SimulationConfig.parse({**JOB, "seed": seed, "rounds": rounds, "protection": protection})
    workload = _WithLiar if with_liar else TorchWorkload
    with session(job, folder, executor="serial", make_workload=workload) as ready:
        return play_all(ready, lambda _: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="*", default=list(OPTIONS))
    arguments = parser.parse_args()
    _say("option", "accuracy (by seed)", "with a liar (by seed)", "epsilon", "MB up", "CPU seconds")
    _say(*["---"] * 6)
    for name in arguments.only:
        begin = time.process_time()
        fair = [_play(name, arguments.rounds, seed, False) for seed in arguments.seeds]
        seconds = (time.process_time() - begin) / len(fair)
        lied = [_play(name, arguments.rounds, seed, True) for seed in arguments.seeds if name in ATTACKED]
        epsilon = fair[0].epsilon
        _say(
            name,
            _accuracy(fair),
            _accuracy(lied) if lied else "",
            "" if epsilon is None else f"{epsilon:.1f}",
            f"{np.mean([result.bytes_up for result in fair]) / 1e6:.1f}",
            f"{seconds:.1f}",
        )


def _play(name: str, num_rounds: int, seed: int, with_liar: bool) -> RunResult:
    with tempfile.TemporaryDirectory() as folder:
        return play(Path(folder) / "run", OPTIONS[name], num_rounds, seed, with_liar)


def _accuracy(results: list[RunResult]) -> str:
    """Mean and interval over the seeds, then each of them."""
    found = [100 * (result.accuracy or 0.0) for result in results]
    by_seed = ", ".join(f"{accuracy:.1f}" for accuracy in found)
    over = estimate(found)
    return f"{by_seed} %" if over.half is None else f"{over.mean:.1f} ± {over.half:.1f} % ({by_seed})"


def _say(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
