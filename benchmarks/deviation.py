"""How well T_th holds on the virtual clock: FedEL's choice of windows, tensors and steps.

    python -m benchmarks.deviation

Nothing is trained: importance is drawn at random, and each client does what its timing profile says fits. So
this measures the choice alone; the whole step and the probe count. Deviation is time over T_th, minus one.
VGG16 and ResNet50 have the published times of a Jetson Orin, ALBERT those of this machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedel.core.timing import budget, full_steps
from fedel.models import build as build_model
from fedel.roles.edge import KeptMemories, recall, run_task
from fedel.seeds import generator
from fedel.strategies import build
from fedel.training.orin import orin_profile
from fedel.training.profiler import profile
from fedel.types import LocalWork, Memory, ModelSpec, Task, Tensors, TimingProfile, Trained, TrainSpec, Window

FLEETS = {"1:2:3:4": (1, 2, 3, 4), "1:10": (1, 10), "1:20": (1, 20)}


@dataclass(frozen=True)
class Untrained:
    """A trainer that trains nothing: every tensor has a random importance."""

    spec: ModelSpec
    profile: TimingProfile
    num_samples: int = 1000
    classes: tuple[int, ...] = ()

    @property
    def same_inputs(self) -> bool:
        return False

    def profile_again(self) -> bool:
        return False

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        del model, work
        rng = generator(seed, "importance")
        return {t.name: -float(rng.exponential()) for t in self.spec.weights_in(window.end, window.front)}

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        del model
        steps, share = train_spec.num_steps, train_spec.last_share
        return Trained({}, steps, float(steps), 0.0, last_share=share)


def deviations(
    spec: ModelSpec,
    base: TimingProfile,
    fleet: tuple[int, ...],
    num_rounds: int,
    strategy: Mapping[str, object],
    num_steps: int,
) -> tuple[list[float], list[int], list[int]]:
    """Of every client and round; and the steps, and the deepest block that was trained."""
    scope = str(strategy["budget_scope"])
    method, work = build(strategy), LocalWork(num_steps=num_steps, batch_size=base.batch_size)
    trainers = {f"client-{s}": Untrained(spec, base.scaled(s) if s > 1 else base) for s in fleet}
    t_th = budget(full_steps([t.profile for t in trainers.values()], scope))
    memories = {name: KeptMemories() for name in trainers}
    found, steps, fronts = [], [], []
    importance = {t.name: 1.0 for t in spec.weights}
    for round_num in range(num_rounds):
        rng = np.random.default_rng(round_num)
        importance = {name: float(rng.exponential()) for name in importance}
        for name, trainer in trainers.items():
            task = Task(round_num, name, t_th, work, round_num, global_importance=importance)
            memory = recall(round_num - 1, Memory(), memories[name])
            report = run_task(method, task, memory, {}, trainer, memories[name]).report
            found.append(report.seconds(scope) / task.round_seconds(trainer.num_samples) - 1)
            steps.append(report.num_steps)
            assert report.window is not None
            fronts.append(report.window.front)
    return found, steps, fronts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    print(
        f"{'model':<10}{'fleet':<9}{'scope':<7}{'mean |dev|':>10}{'worst over':>11}{'worst under':>12}"
        f"  steps made of {arguments.steps}"
    )
    for model in ("vgg16", "resnet50", "albert"):
        spec, base = profiled(model)
        for name, fleet in FLEETS.items():
            for scope, extra in (("train", {"steps": "plan"}), ("round", {})):
                table = {"name": "fedel", "budget_scope": scope, **extra}
                found, steps, _ = deviations(spec, base, fleet, arguments.rounds, table, arguments.steps)
                mean = statistics.fmean(abs(each) for each in found)
                print(
                    f"{model:<10}{name:<9}{scope:<7}{mean:>10.1%}{max(found):>11.1%}{min(found):>12.1%}"
                    f"  {min(steps)} to {max(steps)}"
                )


def profiled(name: str) -> tuple[ModelSpec, TimingProfile]:
    model = build_model(name)
    if name != "albert":
        return model.spec, orin_profile(model.spec, name)
    tokens = np.random.default_rng(0).integers(1, 1000, size=(4, 64))
    return model.spec, profile(model, (tokens, tokens), LocalWork(batch_size=4))


if __name__ == "__main__":
    main()
