"""Bounded changes, robust means and noise around the fold of a method."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedel import config
from fedel.core.noise import gaussian
from fedel.core.robust import num_trimmed, trimmed_mean
from fedel.errors import ConfigError, UpdateRefused
from fedel.job import Protection, RunConfig
from fedel.roles.aggregator import RoundFold
from fedel.strategies import METHODS, build
from fedel.strategies.protection import RoundStart, check
from fedel.types import Array, ModelSpec, Patch, Report, Role, Tensors, TensorSpec, Update, Where
from tests.simulation.history import play_run
from tests.strategies.fakes import WORK, fleet, same_bits

SPEC = ModelSpec(
    "toy",
    ("one",),
    (TensorSpec("v", 1, (3,)), TensorSpec("w", 1, (2, 3)), TensorSpec("fixed", 1, (2,), Role.FROZEN)),
)
MODEL = {
    name: np.linspace(-1, 1, spec.size, dtype=np.float32).reshape(spec.shape)
    for name, spec in SPEC.by_name.items()
}
FEDAVG = build({"name": "fedavg"})
START = RoundStart(MODEL, 4, secret=b"for this test")


def update(client: str, patches: dict[str, Patch], num_samples: int = 10) -> Update:
    return Update(patches, Report(client, 0, num_samples, num_steps=5, effective_steps=5.0, loss=1.0))


def moves(client: str, by: float, *names: str, num_samples: int = 10) -> Update:
    """Every value of these tensors changes by so much."""
    patches = {name: Patch((MODEL[name] + np.float32(by)).astype(np.float32)) for name in names}
    return update(client, patches, num_samples)


def fold(updates: Any, start: RoundStart = START, strategy: Any = FEDAVG, **options: Any) -> Tensors:
    made = RoundFold(strategy, SPEC, Protection(**options), start)
    for each in updates:
        made.add(each)
    return made.finish(MODEL, {}).model


def norm(new: Tensors, old: Tensors = MODEL) -> float:
    return float(np.sqrt(sum(float(((new[n] - old[n]).astype(np.float64) ** 2).sum()) for n in old)))


# Clipping


def test_a_change_within_the_limit_keeps_its_bits() -> None:
    updates = [moves("a", 0.01, "v", "w"), moves("b", -0.02, "w", num_samples=3)]
    assert same_bits(fold(updates), fold(updates, clip_norm=10.0))


@pytest.mark.parametrize("name", METHODS)
def test_one_client_moves_the_model_by_at_most_the_limit(name: str) -> None:
    new = fold([moves("evil", 1e6, "v", "w")], strategy=build({"name": name}), clip_norm=0.5)
    assert 0.49 < norm(new) <= 0.5 * (1 + 1e-5)


def test_parts_are_clipped_by_what_they_change() -> None:
    where: Where = (slice(0, 1), slice(0, 2))
    sent = update("a", {"w": Patch(MODEL["w"][where] + np.float32(30), where)})
    new = fold([sent], clip_norm=1.0)
    assert norm(new) == pytest.approx(1.0, rel=1e-5)
    assert MODEL["w"][1].tobytes() == new["w"][1].tobytes()


def test_shards_clip_their_share_together_to_the_limit() -> None:
    specs, squares = [SPEC.subset({"v"}), SPEC.subset({"w"})], 0.0
    for spec in specs:
        names = tuple(spec.by_name)
        part = {name: MODEL[name] for name in names}
        start = replace(START, model=part, share=sum(t.size for t in spec.tensors) / 9)
        made = RoundFold(FEDAVG, spec, Protection(clip_norm=2.0), start)
        made.add(moves("evil", 1e5, *names))
        squares += norm(made.finish(part, {}).model, part) ** 2
    assert squares == pytest.approx(4.0, rel=1e-4)


def test_clipping_refuses_what_is_not_a_number() -> None:
    made = RoundFold(FEDAVG, SPEC, Protection(clip_norm=1.0), START)
    with pytest.raises(UpdateRefused, match="NaN"):
        made.add(moves("evil", float("nan"), "v"))
    assert same_bits(MODEL, made.finish(MODEL, {}).model)


# Trimmed mean and median


def plain_trimmed_mean(values: list[float], trim: float) -> float:
    drop = num_trimmed(len(values), trim)
    return float(np.mean(sorted(values)[drop : len(values) - drop]))


@pytest.mark.parametrize(("kind", "trim"), [("median", 0.5), ("trimmed_mean", 0.2)])
def test_liars_do_not_move_it(kind: str, trim: float) -> None:
    honest = [moves(f"h{n}", 0.01 * n, "v", "w") for n in range(5)]
    liars = [moves("x", 1e5, "v", "w")]
    new = fold([*honest, *liars], fold=kind, trim=min(trim, 0.4))
    changes = [np.float64(u.patches["v"].values[0]) for u in [*honest, *liars]]
    assert new["v"][0] == np.float32(plain_trimmed_mean(changes, trim))
    assert np.abs(new["v"] - MODEL["v"]).max() < 0.05


@pytest.mark.parametrize("kind", ["median", "trimmed_mean"])
def test_every_value_over_those_who_trained_it(kind: str) -> None:
    mask = np.zeros((2, 3), bool)
    mask[1, 2] = True
    updates = [
        moves("a", 1.0, "v"),
        update("b", {"w": Patch(np.full((1, 2), 7, np.float32), (slice(0, 1), slice(0, 2)))}),
        update("c", {"w": Patch(np.array([9], np.float32), mask)}),
        update("d", {"w": Patch(np.array([[5], [6]], np.float32), np.ix_([0, 1], [0]))}),
    ]
    new = fold(updates, fold=kind)
    old = MODEL["w"]
    assert [[6, 7, old[0, 2]], [6, old[1, 1], 9]] == new["w"].tolist()
    assert MODEL["fixed"].tobytes() == new["fixed"].tobytes()


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=3), min_size=1, max_size=4),
    st.floats(0, 0.5),
)
def test_robust_means_in_any_order(columns: list[list[float]], trim: float) -> None:
    old, results = np.zeros(3, np.float32), set()
    for order in itertools.permutations(columns):
        patches = [(Patch(np.array(values, np.float32)), 1.0) for values in order]
        results.add(trimmed_mean(old, patches, trim).tobytes())
    expected = [plain_trimmed_mean([values[i] for values in columns], trim) for i in range(3)]
    assert 1 == len(results)
    np.testing.assert_allclose(np.frombuffer(results.pop(), np.float32), expected, rtol=1e-6, atol=1e-12)


def test_a_large_tensor_goes_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    old: Array = rng.normal(size=(50, 7)).astype(np.float32)
    masks = [None, (slice(0, 20), slice(0, 3)), rng.random((50, 7)) < 0.5, np.ix_([4, 1, 30], [6, 2])]
    patches = [
        (
            Patch(
                rng.normal(size=old[where].shape if where is not None else old.shape).astype(np.float32), where
            ),
            f,
        )
        for where, f in zip(masks, (1.0, 0.5, 1.0, 0.25), strict=True)
    ]
    at_once = trimmed_mean(old, patches, 0.3)
    monkeypatch.setattr("fedel.core.robust._ROOM", 40)
    assert at_once.tobytes() == trimmed_mean(old, patches, 0.3).tobytes()


def test_pyramidfl_counts_the_absent_as_no_change() -> None:
    strategy = build({"name": "pyramidfl"})
    updates = [moves("a", 1.0, "v", "w"), moves("b", 1.0, "w"), moves("c", 1.0, "w")]
    new = fold(updates, strategy=strategy, fold="median")
    assert same_bits({"v": MODEL["v"]}, {"v": new["v"]})
    assert new["w"][0, 0] == MODEL["w"][0, 0] + 1


PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 2.0, "num_expected": 4}


@pytest.mark.parametrize("protection", [{"fold": "median"}, PRIVATE])
def test_what_damping_does_not_go_with(protection: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"damping"):
        check(build({"name": "fedel", "damping": 0.5}), SPEC, Protection(**protection))


def test_damping_of_one_goes_with_a_median_of_whole_tensors() -> None:
    check(build({"name": "fedel", "damping": 1}), SPEC, Protection(fold="median"))
    with pytest.raises(ConfigError, match=r"damping = 1 .*set damping to 0$"):
        check(build({"name": "heterofl", "damping": 1}), SPEC, Protection(fold="median"))


# Noise


def test_noise_is_the_same_again_and_differs_by_round_tensor_and_secret() -> None:
    updates = [moves("a", 0.1, "v"), moves("b", 0.2, "w")]
    first = fold(updates, **PRIVATE)
    assert same_bits(first, fold(updates[::-1], **PRIVATE))
    for other in (replace(START, round_num=5), replace(START, secret=b"another")):
        assert not same_bits(first, fold(updates, other, **PRIVATE))
    assert gaussian(b"s", 3, "v").tolist() != gaussian(b"s", 3, "w").tolist()


def test_a_private_round_is_the_sum_of_clipped_changes_over_the_expected() -> None:
    silent = {name: new - MODEL[name].astype(np.float64) for name, new in fold([], **PRIVATE).items()}
    new = fold([moves("a", 1e6, "v"), moves("b", 1e6, "v", num_samples=999)], **PRIVATE)
    change = (new["v"] - MODEL["v"]) - silent["v"]
    np.testing.assert_allclose(change, 2 / np.sqrt(3) / 4, rtol=1e-4)
    assert (silent["w"] != 0).all()
    assert not silent["fixed"].any()
    assert np.linalg.norm(change * 4 / 2) <= 1.0 + 1e-6


def test_noise_has_its_distribution() -> None:
    numbers = gaussian(b"secret", 200_001, "test")
    assert abs(numbers.mean()) < 0.01
    assert numbers.std() == pytest.approx(1.0, rel=0.01)
    assert np.mean(np.abs(numbers) > 1.959964) == pytest.approx(0.05, rel=0.05)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01


def test_noise_needs_a_secret() -> None:
    with pytest.raises(ValueError, match="secret"):
        fold([], RoundStart(MODEL), **PRIVATE)


# Settings


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"fold": "mode"}, "trimmed_mean"),
        ({"trim": 0.5}, "median"),
        ({"clip_norm": -1.0}, "not negative"),
        ({"clip_norm": float("nan")}, "numbers"),
        ({"noise_multiplier": 1.0}, "clip_norm"),
        ({"noise_multiplier": 1.0, "clip_norm": 1.0}, "num_expected"),
        ({"noise_multiplier": 1.0, "clip_norm": 1.0, "num_expected": 3, "fold": "median"}, "mean"),
        ({"delta": 0.0}, "delta"),
        ({"secure": True, "clip_norm": 1.0}, "secure"),
    ],
)
def test_settings_that_make_no_sense(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config.parse(Protection, table, "[protection]")


def test_options_that_do_not_go_with_the_method_or_model() -> None:
    with pytest.raises(ConfigError, match="'fednova' has a fold of its own"):
        check(build({"name": "fednova"}), SPEC, Protection(fold="median"))
    check(build({"name": "fednova"}), SPEC, Protection(clip_norm=1.0))
    statistics = replace(SPEC, tensors=(*SPEC.tensors, TensorSpec("bn.mean", 1, (2,), Role.BUFFER)))
    with pytest.raises(ConfigError, match="batch norm"):
        check(FEDAVG, statistics, Protection(**PRIVATE))


@pytest.mark.parametrize("name", ["fedel", "heterofl", "fiarse", "pyramidfl", "fedavg"])
@pytest.mark.parametrize("protection", [{"clip_norm": 0.3}, {"fold": "median", "clip_norm": 5.0}])
def test_a_protected_run_repeats_to_the_bit(name: str, protection: dict[str, Any]) -> None:
    table = {
        "strategy": {"name": name},
        "rounds": {"num_rounds": 3},
        "work": vars(WORK),
        "protection": protection,
    }
    run = RunConfig.parse(table)
    first, second = (play_run(run, fleet(5), backwards=backwards) for backwards in (False, True))
    assert same_bits(first.model, second.model)
    assert not same_bits(first.model, play_run(replace(run, protection=Protection()), fleet(5)).model)
