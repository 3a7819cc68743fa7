"""One local-training call on each real data set lowers the loss. Sets that are not here are skipped."""

import numpy as np
import pytest
import torch

from fedel.data import load_data
from fedel.data.files import data_root
from fedel.data.store import is_present
from fedel.models import build
from fedel.training.objective import cross_entropy
from fedel.training.profiler import profile
from fedel.training.trainer import TorchTrainer
from fedel.types import LocalWork, TrainSpec

SETS = {
    "cifar10": ("vgg16", {"width": 0.125, "batch_norm": True}),
    "fashion-mnist": ("vgg16", {"width": 0.125, "batch_norm": True}),
    "tiny-imagenet": ("vgg16", {"width": 0.125, "batch_norm": True}),
    "speech-commands": ("resnet50", {"width": 0.125}),
    "mail": ("albert", {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "mode": "unshared"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_training_lowers_the_loss(name):
    if not is_present(name, data_root()):
        pytest.skip(f"{name} is not here; `fedel data get {name}` brings it")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = load_data(name)
    model_name, options = SETS[name]
    text = model_name == "albert"
    work = LocalWork(
        batch_size=8 if text else 32, lr=1e-3 if text else 0.02, optimiser="adamw" if text else "sgd"
    )
    indices = np.random.default_rng(0).permutation(len(data.train))[:640]
    batch = data.train_batch(indices[: work.batch_size])
    model = build(model_name, sample_input=torch.from_numpy(batch[0]), num_classes=data.num_classes, **options)
    trainer = TorchTrainer(model, data, indices, profile(model, batch, work, rounds=1))
    start = model.tensors()
    train_spec = TrainSpec(
        work, 30 if text else 60, 1, frozenset(t.name for t in model.spec.weights), (model.spec.num_blocks,)
    )

    def loss_of(tensors):
        model.load(tensors)
        x, y = data.train_batch(indices[:64])
        with torch.no_grad():
            return float(cross_entropy(model.eval()(torch.from_numpy(x)), torch.from_numpy(y))[0])

    before = loss_of(start)
    trained = trainer.train(start, train_spec)
    after = loss_of({**start, **{n: p.values for n, p in trained.patches.items()}})
    print(f"{name}: loss {before:.3f} -> {after:.3f} on the client's own samples, {trained.seconds:.1f} s")
    assert after < 0.95 * before
