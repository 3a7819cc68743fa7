"""The hooks of the methods in the torch trainer, each against its formula written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedel.core.sparsity import maskable
from fedel.core.steps import effective_steps
from fedel.core.timing import full_step
from fedel.data.dataset import Dataset
from fedel.models.blocks import BlockModel
from fedel.strategies.depthfl import Distillation, FedDyn, mutual_distillation
from fedel.strategies.fedel import FedEL
from fedel.strategies.fedprox import Pull
from fedel.strategies.fiarse import LargeWeights
from fedel.strategies.heterofl import OwnClasses, Scaler
from fedel.strategies.inner_exits import lessons
from fedel.training.flops import flops_profile
from fedel.training.hooks import TorchTraining, loss_of, reweighted
from fedel.training.objective import cross_entropy
from fedel.training.optim import build, first_step
from fedel.training.trainer import TorchTrainer
from fedel.types import Hook, LocalWork, Memory, Role, Task, TimingProfile, TrainSpec, Window

from .toys import INDICES, assert_close, batches_of, conv_block, head, make_model, trainer_of, whole


def sgd_by_hand(
    model: BlockModel,
    data: Dataset,
    train_spec: TrainSpec,
    loss_of: Callable[[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]], Tensor],
) -> dict[str, np.ndarray]:
    """Plain gradient descent on a loss of (x, y, weights now, weights at the start)."""
    model.train().requires_grad_(True)
    weights = {n: p for n, p in model.named_parameters() if n.startswith("blocks.")}
    start = {n: p.detach().clone() for n, p in weights.items()}
    for x, y in batches_of(data, train_spec):
        gradients = torch.autograd.grad(loss_of(x, y, weights, start), list(weights.values()))
        with torch.no_grad():
            for p, g in zip(weights.values(), gradients, strict=True):
                p.sub_(g, alpha=train_spec.work.lr)
    return {n: p.detach().numpy().copy() for n, p in weights.items()}


@pytest.fixture
def bare(work: LocalWork) -> LocalWork:
    return replace(work, momentum=0.0, weight_decay=0.0)


def test_fedprox_pulls_towards_the_model_of_the_round(
    plain: BlockModel, data: Dataset, bare: LocalWork, profile: TimingProfile
) -> None:
    mu, start, train_spec = 0.7, plain.tensors(), whole(plain, bare, hooks=(Pull(0.7),))
    patches = trainer_of(plain, data, profile).train(start, train_spec).patches
    plain.load(start)
    expected = sgd_by_hand(
        plain,
        data,
        train_spec,
        lambda x, y, w, w0: F.cross_entropy(plain(x), y) + mu / 2 * sum(((w[n] - w0[n]) ** 2).sum() for n in w),
    )
    assert_close(expected, {n: p.values for n, p in patches.items()})


def test_feddyn_subtracts_the_drift_and_pulls_back(
    plain: BlockModel, data: Dataset, bare: LocalWork, profile: TimingProfile
) -> None:
    rng, start, alpha = np.random.default_rng(0), plain.tensors(), 0.3
    drift = {t.name: rng.normal(0, 0.1, t.shape).astype(np.float32) for t in plain.spec.weights}
    train_spec = whole(plain, bare, hooks=(FedDyn(alpha, drift),))
    patches = trainer_of(plain, data, profile).train(start, train_spec).patches
    plain.load(start)
    expected = sgd_by_hand(
        plain,
        data,
        train_spec,
        lambda x, y, w, w0: (
            F.cross_entropy(plain(x), y)
            + sum(
                -(w[n] * torch.from_numpy(drift[n])).sum() + alpha / 2 * ((w[n] - w0[n]) ** 2).sum() for n in w
            )
        ),
    )
    assert_close(expected, {n: p.values for n, p in patches.items()})


def test_mutual_distillation_is_the_mean_divergence_from_the_other_exits() -> None:
    torch.manual_seed(0)
    logits = [torch.randn(5, 3, requires_grad=True) for _ in range(3)]
    mutual_distillation(logits).backward()
    probabilities = [z.detach().softmax(1) for z in logits]
    for i, z in enumerate(logits):
        # d KL(p_j || softmax(z_i)) / d z_i = (softmax(z_i) - p_j) / N
        expected = sum((probabilities[i] - p) / 5 / 2 for j, p in enumerate(probabilities) if j != i)
        torch.testing.assert_close(z.grad, expected, atol=1e-6, rtol=1e-5)


def test_losses_of_several_exits_are_summed_and_the_distillation_weighted() -> None:
    torch.manual_seed(0)
    logits, y = [torch.randn(6, 4) for _ in range(2)], torch.tensor([0, 1, 2, 3, 0, 1])
    training = TorchTraining(LocalWork(), {}, {}, {}, torch.device("cpu"))
    loss, each = loss_of((Distillation(0.25),), training, logits, y)
    expected = sum(F.cross_entropy(z, y) for z in logits) + 0.25 * mutual_distillation(logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(each, sum(F.cross_entropy(z, y, reduction="none") for z in logits) / 2)


def test_tokens_without_a_target_do_not_count() -> None:
    torch.manual_seed(0)
    logits, y = torch.randn(2, 3, 5), torch.tensor([[-100, 4, -100], [1, -100, 2]])
    mean, each = cross_entropy(logits, y)
    rows = [F.cross_entropy(logits[n, i], y[n, i]) for n, i in ((0, 1), (1, 0), (1, 2))]
    torch.testing.assert_close(mean, sum(rows) / 3)
    torch.testing.assert_close(each, torch.stack([rows[0], (rows[1] + rows[2]) / 2]))


def test_masked_loss_sets_logits_of_absent_classes_to_zero(
    plain: BlockModel, data: Dataset, bare: LocalWork, profile: TimingProfile
) -> None:
    held = np.flatnonzero(np.isin(data.train.y, [0, 2]))
    trainer = TorchTrainer(plain, data, held, profile)
    start, bias = plain.tensors(), "blocks.classifier.2.bias"
    assert trainer.classes == (0, 2)
    patches = trainer.train(start, whole(plain, bare, hooks=(OwnClasses((0, 2)),))).patches
    moved = patches[bias].values != start[bias]
    assert moved.tolist() == [True, False, True, False]


def test_fiarse_gradient_is_the_formula_with_factor_one_and_a_half_at_the_threshold() -> None:
    model = make_model()
    conv = model.blocks["one"].conv
    theta = 0.2
    with torch.no_grad():
        conv.weight.fill_(3 * theta)
        conv.weight[0] = theta
        conv.weight[1] = 0.5 * theta
    x = torch.ones(2, 1, 8, 8)
    with reweighted(model, (LargeWeights(("blocks.one.conv.weight",), theta),)):
        parameter = dict(model.blocks.named_parameters())["one.conv.parametrizations.weight.original"]
        conv(x).sum().backward()
    assert conv.weight is parameter
    effective = (conv.weight * (conv.weight.abs() >= theta)).detach().requires_grad_()
    F.conv2d(x, effective, conv.bias.detach(), padding=1).sum().backward()
    factor = torch.full((4, 1, 1, 1), 1.375)
    factor[0], factor[1] = 1.5, 0.0
    torch.testing.assert_close(conv.weight.grad, effective.grad * factor)


def test_fiarse_leaves_small_weights_alone_and_never_masks_norms(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    start, theta = normed.tensors(), 0.08
    hook = LargeWeights(maskable(normed.spec), theta)
    train_spec = whole(normed, work, hooks=(hook,), static_norm=True)
    patches = trainer_of(normed, data, profile).train(start, train_spec).patches
    for t in normed.spec.weights:
        moved = patches[t.name].values != start[t.name]
        small = np.abs(start[t.name]) < theta
        if ".bn." in t.name:
            assert moved.all(), t.name
        else:
            assert not moved[small].any(), t.name
            assert moved[~small].mean() > 0.5, t.name
    assert not any("parametrizations" in name for name, _ in normed.named_parameters())


def test_threshold_zero_masks_nothing(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    start, trainer = normed.tensors(), trainer_of(normed, data, profile)
    start["blocks.one.conv.bias"][0] = 0.0
    plain = trainer.train(start, whole(normed, work)).patches
    hook = LargeWeights(maskable(normed.spec), 0.0)
    masked = trainer.train(start, whole(normed, work, hooks=(hook,))).patches
    assert all(masked[name].values.tobytes() == patch.values.tobytes() for name, patch in plain.items())


@pytest.mark.parametrize("hooks", [(), (Scaler(0.5),)])
def test_a_narrow_model_sends_the_part_of_each_tensor_it_trained(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile, hooks: tuple[Hook, ...]
) -> None:
    start, train_spec = normed.tensors(), whole(normed, work, width=0.5, hooks=hooks, num_steps=1)
    patches = trainer_of(normed, data, profile).train(start, train_spec).patches
    narrow, where = normed.narrow(0.5)
    for t in narrow.spec.weights:
        patch = patches[t.name]
        assert patch.values.shape == t.shape
        index = ... if patch.where is None else patch.where
        assert start[t.name][index].shape == t.shape
        np.testing.assert_allclose(patch.values, start[t.name][index], atol=0.3)
    assert where.keys() >= {t.name for t in narrow.spec.weights}


def test_the_scaler_divides_hidden_layers_by_the_width(
    plain: BlockModel, data: Dataset, bare: LocalWork, profile: TimingProfile
) -> None:
    train_spec = whole(plain, bare, width=0.5, hooks=(Scaler(0.5),), num_steps=1)
    scaled = trainer_of(plain, data, profile).train(plain.tensors(), train_spec)
    narrow, _ = plain.narrow(0.5)
    ((x, y),) = batches_of(data, train_spec)
    for name in ("one", "two", "three"):
        narrow.blocks[name].conv.register_forward_hook(lambda _m, _x, out: out / 0.5)
    with torch.no_grad():
        assert scaled.loss == pytest.approx(float(F.cross_entropy(narrow(x), y)), rel=1e-5)


@pytest.mark.parametrize("width", [1.0, 0.5])
def test_static_norm_sends_statistics_of_the_whole_model_as_it_came_over_the_clients_data(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile, width: float
) -> None:
    start = normed.tensors()
    train_spec = whole(normed, work, static_norm=True, width=width)
    patches = trainer_of(normed, data, profile).train(start, train_spec).patches
    normed.load(start)
    x, _ = data.train_batch(INDICES)
    with torch.no_grad():
        activations = normed.blocks["one"].conv(torch.from_numpy(x))
    mean = patches["blocks.one.bn.running_mean"]
    assert mean.where is None
    np.testing.assert_allclose(mean.values, activations.mean((0, 2, 3)), atol=1e-4)
    assert normed.blocks["one"].bn.momentum == 0.1


def test_clipping_bounds_the_first_move(
    plain: BlockModel, data: Dataset, bare: LocalWork, profile: TimingProfile
) -> None:
    start, train_spec = plain.tensors(), whole(plain, replace(bare, clip_norm=1e-3, lr=1.0), num_steps=1)
    patches = trainer_of(plain, data, profile).train(start, train_spec).patches
    moved = np.sqrt(sum(((p.values - start[n]) ** 2).sum() for n, p in patches.items()))
    assert moved == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("momentum", "proximal", "expected"),
    [(0.0, 0.0, 3.0), (0.9, 0.0, 5.61), (0.0, 1.0, 1 + 0.9 + 0.81), (0.9, 1.0, None)],
)
def test_effective_steps_of_fednova(momentum: float, proximal: float, expected: float | None) -> None:
    work = LocalWork(lr=0.1, momentum=momentum)
    if expected is None:  # momentum adds 1, 1.9, 2.71; then each time * (1 - lr * mu) + 1
        expected = (((1 * 0.9 + 1) + 1.9) * 0.9 + 1 + 2.71) * 0.9 + 1
    assert effective_steps(3, work, proximal) == pytest.approx(expected)


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_the_trial_step_is_the_first_step_of_a_fresh_optimiser(work: LocalWork, optimiser: str) -> None:
    work = replace(work, optimiser=optimiser)
    torch.manual_seed(0)
    weight, gradient = torch.randn(50), torch.randn(50)
    leaf = weight.clone().requires_grad_()
    leaf.grad = gradient.clone()
    build([leaf], work).step()
    torch.testing.assert_close(leaf.detach(), weight + first_step(weight, gradient, work))


def test_on_a_frozen_trunk_an_exit_that_is_not_trained_does_not_run(
    data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    torch.manual_seed(0)
    blocks = {name: conv_block(c, 4, False) for name, c in (("one", 1), ("two", 4), ("three", 4))}
    trunk = BlockModel(
        "trunk",
        blocks,
        {name: head(4) for name in blocks},
        num_classes=4,
        exit_each=True,
        frozen=[f"blocks.{name}" for name in blocks],
    )
    ran: list[str] = []
    for name, module in trunk.exits.items():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    selected = frozenset(t.name for t in trunk.spec.weights if t.block == 2)
    train_spec = TrainSpec(work, 1, 1, selected, exits=(1, 2, 3))
    patches = trainer_of(trunk, data, profile).train(trunk.tensors(), train_spec).patches
    assert ran == ["two"]
    assert set(patches) == selected
    assert {trunk.spec.by_name[n].role for n in patches} == {Role.WEIGHT}


def test_taught_exits_of_a_window_come_closer_to_each_other(normed: BlockModel, data: Dataset) -> None:
    """FedEL with ``teach`` in the torch trainer: all exits of the window are sent, and they agree more."""
    x, _ = data.train_batch(INDICES, None)
    profile = flops_profile(normed, torch.from_numpy(x[:2]), batch_size=16)
    client, model = trainer_of(normed, data, profile), normed.tensors()
    work = LocalWork(num_steps=4, batch_size=16, lr=0.05)
    task = Task(0, "a", 0.7 * full_step(profile).backward_seconds, work, seed=1)

    def apart(teach: float) -> float:
        update, _ = FedEL(teach=teach, window_within=True).fit(task, model, Memory(), client)
        assert update.report.window == Window(1, 2)
        normed.load({**model, **{name: patch.values for name, patch in update.patches.items()}})
        with torch.no_grad():
            return float(lessons(normed.eval().all_exits(torch.from_numpy(x))[:2]))

    assert apart(5.0) < 0.8 * apart(1e-6)
