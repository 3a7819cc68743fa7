"""Local training: what must move moves as plain SGD would, what must not is the same to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedel.core.sparsity import maskable
from fedel.core.steps import effective_steps
from fedel.data.dataset import Dataset
from fedel.errors import DataError, ModelError
from fedel.models.blocks import BlockModel
from fedel.strategies.fiarse import LargeWeights
from fedel.training.batches import batch_stream
from fedel.training.trainer import TorchTrainer
from fedel.types import LocalWork, Role, TimingProfile, TrainSpec

from .toys import assert_close, batches_of, make_model, trainer_of, whole


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_training_everything_equals_the_plain_torch_optimiser(
    data: Dataset, work: LocalWork, profile: TimingProfile, optimiser: str
) -> None:
    # Before a batch norm a bias has no gradient but rounding noise, which AdamW would blow up.
    model = make_model(norm=optimiser == "sgd")
    work = replace(work, optimiser=optimiser, lr=0.05 if optimiser == "sgd" else 1e-3)
    train_spec, start = whole(model, work), model.tensors()
    trained = trainer_of(model, data, profile).train(start, train_spec)

    model.load(start)
    model.train().requires_grad_(True)
    parameters = list(model.blocks.parameters())
    oracle = (
        torch.optim.SGD(parameters, lr=work.lr, momentum=0.9, weight_decay=1e-2)
        if optimiser == "sgd"
        else torch.optim.AdamW(parameters, lr=work.lr, weight_decay=1e-2)
    )
    for x, y in batches_of(data, train_spec):
        oracle.zero_grad()
        F.cross_entropy(model(x), y).backward()
        oracle.step()
    expected = {n: v for n, v in model.tensors().items() if n.startswith("blocks.")}
    assert expected.keys() == trained.patches.keys()
    assert_close(expected, {n: p.values for n, p in trained.patches.items()})


def test_a_short_last_step_is_a_step_on_a_part_of_the_batch(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    train_spec, start = whole(normed, work, last_share=0.25), normed.tensors()
    trained = trainer_of(normed, data, profile).train(start, train_spec)
    assert (work.num_steps, 0.25) == (trained.num_steps, trained.last_share)
    assert effective_steps(work.num_steps, work) == trained.effective_steps

    normed.load(start)
    normed.train().requires_grad_(True)
    oracle = torch.optim.SGD(normed.blocks.parameters(), lr=work.lr, momentum=0.9, weight_decay=1e-2)
    *whole_ones, (x, y) = batches_of(data, train_spec)
    for inputs, targets in [*whole_ones, (x[:4], y[:4])]:
        oracle.zero_grad()
        F.cross_entropy(normed(inputs), targets).backward()
        oracle.step()
    expected = {n: v for n, v in normed.tensors().items() if n.startswith("blocks.")}
    assert_close(expected, {n: p.values for n, p in trained.patches.items()})


@pytest.mark.parametrize(("norm", "expected"), [(True, 2), (False, 1)])
def test_batch_norm_never_gets_a_single_sample(
    data: Dataset, work: LocalWork, profile: TimingProfile, norm: bool, expected: int
) -> None:
    model, sizes = make_model(norm), []
    model.blocks["one"].register_forward_hook(lambda _m, x, _y: sizes.append(len(x[0])))
    trainer_of(model, data, profile).train(model.tensors(), whole(model, work, num_steps=2, last_share=1e-3))
    assert [work.batch_size, expected] == sizes


def test_only_selected_weights_their_exit_and_window_statistics_come_back(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    selected = frozenset({"blocks.two.conv.weight", "blocks.three.bn.bias"})
    train_spec = TrainSpec(work, 5, 1, selected, exits=(3,), end=2)
    patches = trainer_of(normed, data, profile).train(normed.tensors(), train_spec).patches
    head = {t.name for t in normed.spec.tensors if t.role is Role.EXIT and t.block == 3}
    statistics = {t.name for t in normed.spec.tensors if t.role is Role.BUFFER and t.block in (2, 3)}
    assert set(patches) == selected | head | statistics
    assert all(p.values.dtype == np.float32 and p.values.flags.owndata for p in patches.values())


def test_everything_else_is_bit_identical_with_momentum_and_weight_decay(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    selected = frozenset({"blocks.two.conv.bias", "blocks.three.conv.weight"})
    start = normed.tensors()
    patches = (
        trainer_of(normed, data, profile).train(start, TrainSpec(work, 5, 1, selected, (3,), end=2)).patches
    )
    after = normed.tensors()
    for name, values in start.items():
        if name in patches:
            assert not np.array_equal(values, after[name]), f"{name} should have moved"
            assert np.array_equal(patches[name].values, after[name])
        else:
            assert np.array_equal(values, after[name]), f"{name} should not have moved"


def test_blocks_beyond_the_exit_never_run_and_blocks_below_the_window_keep_no_activations(
    plain: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    calls: dict[str, list[tuple[bool, bool]]] = {name: [] for name in plain.block_names}
    for name, block in plain.blocks.items():
        block.register_forward_hook(
            lambda module, _, out, name=name: calls[name].append((out.requires_grad, module.training))
        )
    train_spec = TrainSpec(work, 2, 1, frozenset({"blocks.two.conv.weight"}), exits=(3,), end=2)
    trainer_of(plain, data, profile).train(plain.tensors(), train_spec)
    assert calls == {
        "one": [(False, False)] * 2,
        "two": [(True, True)] * 2,
        "three": [(True, True)] * 2,
        "classifier": [],
    }


@pytest.mark.parametrize("name", ["blocks.one.conv.bias", "blocks.two.conv.bias"])
def test_a_bias_trains_the_same_with_and_without_its_kernel_asking_for_a_gradient(
    plain: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile, name: str
) -> None:
    start, train_spec = plain.tensors(), TrainSpec(work, 4, 1, frozenset({name}), exits=(3,))
    patches = trainer_of(plain, data, profile).train(start, train_spec).patches

    plain.load(start)
    plain.train().requires_grad_(False)
    parameters = dict(plain.named_parameters())
    trained = [n for n in patches if n in parameters]
    optimiser = torch.optim.SGD(
        [parameters[n].requires_grad_() for n in trained], lr=work.lr, momentum=0.9, weight_decay=1e-2
    )
    for x, y in batches_of(data, train_spec):
        optimiser.zero_grad()
        F.cross_entropy(plain.exit(3, plain.run(x, 1, 3)), y).backward()
        optimiser.step()
    assert_close({n: plain.tensors()[n] for n in trained}, {n: patches[n].values for n in trained})


def test_the_same_job_twice_gives_the_same_bits_and_leaves_global_randomness_alone(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    start, train_spec = normed.tensors(), whole(normed, work)
    trainer = trainer_of(normed, data, profile)
    before = torch.get_rng_state()
    first = trainer.train(start, train_spec)
    trainer.train(start, replace(train_spec, seed=12, selected=frozenset()))
    second = trainer.train(start, train_spec)
    assert torch.equal(before, torch.get_rng_state())
    assert first.loss == second.loss
    for name, patch in first.patches.items():
        assert np.array_equal(patch.values, second.patches[name].values), name
    other = trainer.train(start, replace(train_spec, seed=12))
    assert not np.array_equal(
        first.patches["blocks.one.conv.weight"].values, other.patches["blocks.one.conv.weight"].values
    )


def test_local_training_lowers_the_loss(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    start, trainer = normed.tensors(), trainer_of(normed, data, profile)
    work = replace(work, weight_decay=0.0)
    trained = trainer.train(start, whole(normed, work, num_steps=40))
    later = trainer.train({**start, **{n: p.values for n, p in trained.patches.items()}}, whole(normed, work))
    assert later.loss < 0.5 * trained.loss
    assert trained.seconds > 0
    assert trained.peak_memory_bytes > 0


def test_with_nothing_to_train_only_statistics_come_back(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    trained = trainer_of(normed, data, profile).train(
        normed.tensors(), whole(normed, work, selected=frozenset())
    )
    assert {normed.spec.by_name[name].role for name in trained.patches} == {Role.BUFFER}
    assert trained.loss > 0


def test_oorts_statistic_is_the_moving_average_of_squared_sample_losses_over_the_first_pass(
    plain: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    train_spec = whole(plain, replace(work, lr=0.0), num_steps=6)
    trained = trainer_of(plain, data, profile).train(plain.tensors(), train_spec)
    means = [
        float(F.cross_entropy(plain(x), y, reduction="none").double().square().mean())
        for x, y in batches_of(data, train_spec)
    ]
    expected = means[0]
    for mean in means[1:4]:
        expected = 0.8 * expected + 0.2 * mean
    assert trained.loss_square == pytest.approx(expected, rel=1e-5)


def test_a_client_smaller_than_a_batch_uses_what_it_has(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    trained = TorchTrainer(normed, data, np.array([5]), profile).train(normed.tensors(), whole(normed, work))
    assert np.isfinite(trained.loss)


def test_a_client_without_samples_is_refused(plain: BlockModel, data: Dataset, profile: TimingProfile) -> None:
    with pytest.raises(DataError, match="no samples"):
        TorchTrainer(plain, data, np.array([], dtype=int), profile)


def test_a_tensor_selected_outside_the_window_is_refused_by_name(
    plain: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    train_spec = TrainSpec(work, 1, 1, frozenset({"blocks.one.conv.weight"}), exits=(3,), end=2)
    with pytest.raises(ModelError, match=r"blocks\.one\.conv\.weight.*blocks 2 to 3"):
        trainer_of(plain, data, profile).train(plain.tensors(), train_spec)


def test_steps_mode_leaves_short_batches_out_and_epoch_mode_keeps_them(work: LocalWork) -> None:
    def sizes(work: LocalWork) -> list[int]:
        stream = batch_stream(np.arange(35), work, np.random.default_rng(0))
        return [len(next(stream)) for _ in range(4)]

    assert sizes(work) == [16, 16, 16, 16]
    assert sizes(replace(work, num_steps=0)) == [16, 16, 3, 16]


def test_an_epoch_visits_every_sample_once(work: LocalWork) -> None:
    stream = batch_stream(np.arange(100, 135), replace(work, num_steps=0), np.random.default_rng(0))
    assert sorted(np.concatenate([next(stream) for _ in range(3)])) == list(range(100, 135))


def test_trainers_that_share_a_model_do_not_disturb_each_other(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    start, train_spec = normed.tensors(), whole(normed, work)
    first = TorchTrainer(normed, data, np.arange(32), profile)
    second = TorchTrainer(normed, data, np.arange(32, 64), profile)
    alone = first.train(start, train_spec).patches
    hooks = (LargeWeights(maskable(normed.spec), 0.1),)
    second.train(start, replace(train_spec, hooks=hooks, static_norm=True, end=2, selected=frozenset()))
    again = first.train(start, train_spec).patches
    assert all(np.array_equal(alone[n].values, again[n].values) for n in alone)
