"""Rounds of FedEL on your own model and data, without a server: profile, plan, fit, fold (aggregate), test.

python examples/own_training.py
"""

import numpy as np
import own  # own.py in this folder
import torch

from fedel.core.timing import budget, full_steps
from fedel.data import from_arrays
from fedel.models import as_block_model
from fedel.strategies import FedEL
from fedel.training.evaluate import evaluate
from fedel.training.profiler import profile
from fedel.training.trainer import TorchTrainer
from fedel.types import ClientView, LocalWork, Memory, RoundContext


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = from_arrays("bars", *own.data())
    work = LocalWork(num_steps=20, batch_size=32, lr=0.05, momentum=0.9)
    batch = data.train_batch(np.arange(work.batch_size))
    model = as_block_model(own.model(), torch.from_numpy(batch[0]), name="bars")
    measured = profile(model, batch, work)

    # Three clients with a third of the data each, on devices that are 1, 2 and 3 times slower than this one.
    trainers = {
        f"client-{s}": TorchTrainer(model, data, np.arange(len(data.train))[s - 1 :: 3], measured.scaled(s))
        for s in (1, 2, 3)
    }
    strategy, weights = FedEL(budget_scope="train"), model.tensors()
    memories = dict.fromkeys(trainers, Memory())
    views = [ClientView(name, t.num_samples, t.profile) for name, t in trainers.items()]
    t_th = budget(full_steps([t.profile for t in trainers.values()]))
    print(f"{model.spec.num_blocks} blocks, T_th {1000 * t_th:.2f} ms per step")
    for round_num in range(8):
        plan = strategy.plan(RoundContext(round_num, 0, model.spec, views, 0, t_th, work))
        fold = strategy.fold(model.spec)
        for task in plan.tasks:
            trainer = trainers[task.client]
            update, memories[task.client] = strategy.fit(task, weights, memories[task.client], trainer)
            fold.add(update)
            window = update.report.window
            print(f"  {task.client}: blocks {window.end} to {window.front}, loss {update.report.loss:.3f}")
        weights = fold.finish(weights, {}).model
        model.load(weights)
        print(f"round {round_num}: accuracy {evaluate(model, data.test_batches()).accuracy:.1%}")


if __name__ == "__main__":
    main()
