"""The importance probe of a device beside an ordinary training step."""

from __future__ import annotations

import numpy as np

from fedel.bench.cpu import Case
from fedel.types import LocalWork, TimingProfile, Window

MODEL, BATCH = "cnn", 32


def probe() -> Case:
    """Of the whole model: the most that a probe costs."""
    import torch

    from fedel.data.dataset import Dataset, Split
    from fedel.data.transforms import Images
    from fedel.models.registry import build
    from fedel.training.trainer import TorchTrainer

    torch.set_num_threads(1)
    model = build(MODEL, in_channels=3)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (4 * BATCH, 3, 32, 32), dtype=np.uint8)
    split = Split(x, rng.integers(0, model.num_classes, len(x)))
    data = Dataset("noise", "image", split, split, tuple(map(str, range(model.num_classes))), Images())
    trainer = TorchTrainer(model, data, np.arange(len(x)), TimingProfile("", "", 0, (), ()))
    start, work = model.tensors(), LocalWork(num_steps=1, batch_size=BATCH, lr=1e-4)
    whole = Window(1, model.spec.num_blocks)

    plain = build(MODEL, in_channels=3)
    optimiser = torch.optim.SGD(plain.parameters(), lr=1e-4)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, model.num_classes, (BATCH,))

    def step() -> None:
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(plain(images), labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return Case(
        "probe",
        f"{MODEL}, all blocks, batch {BATCH}",
        lambda: trainer.probe(start, whole, work, 0),
        "one training step in plain PyTorch",
        step,
    )
