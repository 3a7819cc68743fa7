"""Measured bytes of the parts of a step add up to what a real step has in use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from fedel.core.memory_budget import probe_bytes, step_bytes
from fedel.data.dataset import Dataset
from fedel.models.registry import build
from fedel.training import memory_use
from fedel.training.profile_io import load_profile, save_profile, to_json
from fedel.training.profiler import _samples_within
from fedel.training.profiler import profile as measure_profile
from fedel.training.trainer import TorchTrainer
from fedel.types import BlockBytes, LocalWork, MemoryUse, TimingProfile, TrainSpec, Window
from fedel.wire.codec import profile_from_pb, profile_to_pb

from .toys import make_model

CPU = torch.device("cpu")


def measured(trainer: TorchTrainer, work: LocalWork) -> MemoryUse:
    x, y = trainer.data.train_batch(np.arange(work.batch_size))
    return memory_use.measure(trainer.model, torch.from_numpy(x), torch.from_numpy(y), work, CPU)


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
@pytest.mark.parametrize("norm", [False, True])
def test_a_step_never_has_more_in_use(
    data: Dataset, work: LocalWork, profile: TimingProfile, norm: bool, optimiser: str
) -> None:
    model, work = make_model(norm), replace(work, batch_size=32, optimiser=optimiser, num_steps=2)
    trainer = TorchTrainer(model, data, np.arange(96), profile)
    use, start = measured(trainer, work), model.tensors()
    fixed = use.base_bytes + sum(t.size for t in model.spec.tensors) * 4
    rng = np.random.default_rng(1)
    for end in range(1, 5):
        for front in range(end, 5):
            window, names = Window(end, front), [t.name for t in model.spec.weights_in(end, front)]
            selected = frozenset(n for n in names if rng.random() < 0.7)
            job = TrainSpec(work, 2, 0, selected, model.spec.exits_for(end, front), end)
            _, in_use = memory_use.peak_of(lambda job=job: trainer.train(start, job), CPU)
            priced = step_bytes(model.spec, use, selected, window) - fixed
            assert in_use <= priced + 4096 <= 2 * in_use + 100_000
            _, in_use = memory_use.peak_of(lambda w=window: trainer.probe(start, w, work, 0), CPU)
            assert in_use <= probe_bytes(model.spec, use, window) - fixed + 4096


def test_activations_are_what_autograd_keeps(data: Dataset, work: LocalWork, profile: TimingProfile) -> None:
    use = measured(TorchTrainer(make_model(norm=True), data, np.arange(64), profile), work)
    image = 16 * 8 * 8 * 4
    # Batch norm keeps its input, the rectifier its output, which is in place; plus mean and deviation.
    for block, channels in zip(use.blocks, (4, 6, 8), strict=False):
        assert block.activation_bytes == pytest.approx(2 * channels * image, abs=200)
        assert block.output_bytes == channels * image


def test_measuring_changes_nothing(data: Dataset, work: LocalWork, profile: TimingProfile) -> None:
    model = make_model(norm=True)
    before = model.tensors()
    measured(TorchTrainer(model, data, np.arange(64), profile), work)
    assert all(np.array_equal(values, before[name]) for name, values in model.tensors().items())
    assert not any(p.requires_grad for p in model.parameters())


def test_a_frozen_trunk_is_measured_by_its_exits() -> None:
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_heads": 2, "ffn_size": 32, "max_length": 8}
    model = build("albert", vocab_size=64, num_layers=2, bottleneck=4, **sizes)
    tokens = torch.ones(4, 8, dtype=torch.int64)
    use = memory_use.measure(model, tokens, tokens, LocalWork(), CPU)
    assert all(b.activation_bytes == 0 and b.exit_bytes > 0 for b in use.blocks)


def test_part_of_the_batch_is_timed_where_memory_is_short(data: Dataset, work: LocalWork) -> None:
    model, batch = make_model(norm=True), data.train_batch(np.arange(64))
    whole = measure_profile(model, batch, work, rounds=1)
    assert whole.memory is not None
    everything = {t.name for t in model.spec.weights}
    need = step_bytes(model.spec, whole.memory, everything, Window(1, 4))
    assert _samples_within(model.spec, whole.memory, 64) == 64
    assert _samples_within(model.spec, replace(whole.memory, limit_bytes=need), 64) == 32
    assert _samples_within(model.spec, replace(whole.memory, limit_bytes=1), 64) == 2
    short = measure_profile(model, batch, work, rounds=1, limit_bytes=1)
    assert short.batch_size == 64
    assert short.memory_limit_bytes == 1
    # Drawn out from a few samples; kernels may need a little more or less space then.
    assert short.memory is not None
    for few, all_of_them in zip(short.memory.blocks, whole.memory.blocks, strict=True):
        assert astuple(few) == pytest.approx(astuple(all_of_them), rel=0.05, abs=1000)


USE = MemoryUse(5, 6, 2, (BlockBytes(1, 2, 3, 4, 5),) * 4, limit_bytes=9)


def test_files_and_messages_carry_memory(profile: TimingProfile, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for each in (replace(profile, memory=USE), profile):
        save_profile(each, tmp_path / "profile.json")
        assert load_profile(tmp_path / "profile.json") == each
        assert profile_from_pb(profile_to_pb(each)) == each


def test_files_from_before_memory_was_measured_load(profile: TimingProfile, tmp_path) -> None:  # type: ignore[no-untyped-def]
    old = to_json(profile).replace(',\n "memory": null', "")
    assert "memory" not in old
    (tmp_path / "old.json").write_text(old)
    assert load_profile(tmp_path / "old.json").memory is None


def test_without_kineto_memory_is_not_measured(
    data: Dataset, work: LocalWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler, "kineto_available", lambda: False)
    found = measure_profile(make_model(), data.train_batch(np.arange(16)), work, rounds=1, limit_bytes=1)
    assert found.memory is None
    assert found.memory_limit_bytes == 0


def test_two_threads_measure_at_the_same_time() -> None:
    """As two agents in one process do; torch's profiler alone crashes then."""

    def measured(size: int) -> list[int]:
        peaks = []
        for _ in range(20):
            made, peak = memory_use.peak_of(lambda: torch.ones(size).mul(2), torch.device("cpu"))
            assert size == len(made)
            peaks.append(peak)
        return peaks

    with ThreadPoolExecutor(2) as threads:
        small, large = threads.map(measured, (1_000, 100_000))
    assert 8_000 <= min(small) == max(small) < 9_000, "each counts its own bytes"
    assert 800_000 <= min(large) == max(large) < 801_000
