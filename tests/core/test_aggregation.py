import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedel.core.aggregation import MaskedMean, NormalisedMean
from fedel.core.exact_sum import ExactSum
from fedel.errors import UpdateRefused
from fedel.types import Patch


def f32(*values):
    return np.array(values, np.float32)


def fold(mean, updates, model):
    for patches, *weights in updates:
        mean.add(patches, *weights)
    return mean.finish(model)


def test_the_mean_is_over_those_who_trained_the_tensor():
    model = {"a": f32(0, 0), "b": f32(1, 1), "c": f32(0.1, -0.3)}
    new = fold(
        MaskedMean(),
        [({"a": Patch(f32(1, 2))},), ({"a": Patch(f32(3, 5)), "b": Patch(f32(7, 8))},)],
        model,
    )
    assert [2.0, 3.5] == new["a"].tolist()
    assert [7.0, 8.0] == new["b"].tolist()
    assert model["c"].tobytes() == new["c"].tobytes()
    assert np.float32 == new["a"].dtype


def test_samples_weigh():
    new = fold(
        MaskedMean(weighted=True),
        [({"a": Patch(f32(1.0))}, 30), ({"a": Patch(f32(5.0))}, 10)],
        {"a": f32(0.0)},
    )
    assert [2.0] == new["a"].tolist()


def test_slices_and_masks_are_averaged_value_by_value():
    model = {"w": np.full((3, 3), 9, np.float32)}
    mask = np.zeros((3, 3), bool)
    mask[0, 0] = mask[2, 2] = True
    updates = [
        ({"w": Patch(np.ones((2, 2), np.float32), (slice(0, 2), slice(0, 2)))},),
        ({"w": Patch(f32(3, 5), mask)},),
    ]
    new = fold(MaskedMean({"w": (3, 3)}), updates, model)
    assert [[2, 1, 9], [1, 1, 9], [9, 9, 5]] == new["w"].tolist()


def test_whole_and_partial_patches_mix():
    updates = [({"w": Patch(f32(1, 1))},), ({"w": Patch(f32(3), (slice(0, 1),))},)]
    new = fold(MaskedMean({"w": (2,)}), updates, {"w": f32(9, 9)})
    assert [2.0, 1.0] == new["w"].tolist()


def test_absent_tensors_count_as_the_old_value_where_asked():
    updates = [({"a": Patch(f32(4.0))},), ({"b": Patch(f32(1.0))},)]
    new = fold(MaskedMean(damping=1.0), updates, {"a": f32(0.0), "b": f32(1.0)})
    assert [2.0] == new["a"].tolist()
    assert [1.0] == new["b"].tolist()


def test_damping_moves_a_value_by_the_share_of_the_clients_that_trained_it():
    # Of a weight of 16 in all, 4 trained 'a': the root of a quarter is a half of the way from 2 to 6.
    updates = [({"a": Patch(f32(6.0))}, 4), ({}, 12)]
    model = {"a": f32(2.0), "b": f32(-0.0)}
    new = fold(MaskedMean(weighted=True, damping=0.5), updates, model)
    assert [4.0] == new["a"].tolist()
    assert model["b"].tobytes() == new["b"].tobytes()


def test_damping_of_parts_is_value_by_value():
    model = {"w": f32(8, 8, -0.0)}
    two, one = Patch(f32(0, 0), (slice(0, 2),)), Patch(f32(4), (slice(0, 1),))
    updates = [({"w": two},), ({"w": one},), ({},), ({},)]
    new = fold(MaskedMean({"w": (3,)}, damping=0.5), updates, model)
    # Two of four: 8 + sqrt(1/2) * (2 - 8). One of four: 8 + 1/2 * (0 - 8). Nobody: the very same bits.
    np.testing.assert_allclose(new["w"][:2], [8 - 6 * 0.5**0.5, 4.0], rtol=1e-7)
    assert model["w"][2:].tobytes() == new["w"][2:].tobytes()


def test_fednova_is_damped_alike():
    plain, damped = NormalisedMean(), NormalisedMean(damping=0.5)
    for nova in (plain, damped):
        nova.add({"w": Patch(f32(0.0))}, 3, 5.0)
        nova.add({}, 9, 2.0)
    model = {"w": f32(1.0)}
    change = plain.finish(model)["w"] - model["w"]
    np.testing.assert_allclose(damped.finish(model)["w"], model["w"] + 0.5 * change, rtol=1e-7)


floats = st.floats(-100, 100, width=32)
masked = st.lists(
    st.tuples(hnp.arrays(np.float32, 7, elements=floats), hnp.arrays(bool, 7), st.integers(1, 10_000)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(masked, st.floats(0.01, 1))
def test_damping_equals_a_loop_in_double_precision_in_any_order(clients, damping):
    old = np.linspace(-1, 1, 7, dtype=np.float32)
    results = set()
    for permutation in itertools.permutations(clients):
        mean = MaskedMean({"w": (7,)}, weighted=True, damping=damping)
        for values, mask, weight in permutation:
            mean.add({"w": Patch(values[mask], mask)} if mask.any() else {}, weight)
        results.add(mean.finish({"w": old})["w"].tobytes())
    assert 1 == len(results)
    actual, everyone = np.frombuffer(results.pop(), np.float32), sum(weight for *_, weight in clients)
    for place in range(7):
        trained = [(float(values[place]), weight) for values, mask, weight in clients if mask[place]]
        expected = float(old[place])
        if trained:
            weight = sum(weight for _, weight in trained)
            mean_value = sum(value * weight for value, weight in trained) / weight
            expected += (weight / everyone) ** damping * (mean_value - expected)
        np.testing.assert_allclose(actual[place], expected, rtol=3e-7, atol=3e-6)


def test_what_all_clients_trained_is_not_damped_to_the_bit():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=50).astype(np.float32), weight) for weight in (3, 7, 11)]
    plain, damped = MaskedMean(weighted=True), MaskedMean(weighted=True, damping=0.7)
    model = {"w": np.ones(50, np.float32)}
    for values, weight in clients:
        for mean in (plain, damped):
            mean.add({"w": Patch(values)}, weight)
    assert plain.finish(model)["w"].tobytes() == damped.finish(model)["w"].tobytes()


def test_one_client_alone_gives_its_values_back_to_the_bit():
    values = np.random.default_rng(0).normal(0, 0.05, 1000).astype(np.float32)
    values[np.abs(values) < 2**-17] = 0.5
    new = fold(MaskedMean(), [({"w": Patch(values)},)], {"w": np.zeros(1000, np.float32)})
    assert values.tobytes() == new["w"].tobytes()


updates = st.lists(
    st.tuples(hnp.arrays(np.float32, 7, elements=floats), st.integers(1, 10_000), st.integers(1, 500)),
    min_size=2,
    max_size=5,
)


@settings(deadline=None)
@given(updates, st.booleans())
def test_the_order_of_arrival_does_not_change_a_bit(clients, weighted):
    model = {"w": np.linspace(-1, 1, 7, dtype=np.float32)}
    results = set()
    for permutation in itertools.permutations(clients):
        mean = MaskedMean(weighted=weighted)
        nova = NormalisedMean()
        for values, weight, steps in permutation:
            mean.add({"w": Patch(values)}, weight if weighted else 1)
            nova.add({"w": Patch(values)}, weight, steps)
        results.add(mean.finish(model)["w"].tobytes() + nova.finish(model)["w"].tobytes())
    assert 1 == len(results)


@settings(deadline=None)
@given(updates)
def test_equals_a_mean_in_double_precision(clients):
    mean = MaskedMean(weighted=True)
    for values, weight, _ in clients:
        mean.add({"w": Patch(values)}, weight)
    expected = np.average([c[0].astype(np.float64) for c in clients], axis=0, weights=[c[1] for c in clients])
    actual = mean.finish({"w": np.zeros(7, np.float32)})["w"]
    np.testing.assert_allclose(actual, expected, rtol=2e-7, atol=1e-8)


def test_fednova_equals_its_formula():
    rng = np.random.default_rng(1)
    model = {"w": rng.normal(size=5).astype(np.float32)}
    clients = [(rng.normal(size=5).astype(np.float32), p, a) for p, a in [(10, 5.61), (30, 2.0), (5, 40.0)]]
    mean = NormalisedMean()
    for values, p, a in clients:
        mean.add({"w": Patch(values)}, p, a)
    total = sum(p for _, p, _ in clients)
    effective = sum(p / total * a for _, p, a in clients)
    expected = model["w"] - sum(p / total * effective / a * (model["w"] - v) for v, p, a in clients)
    np.testing.assert_allclose(mean.finish(model)["w"], expected, rtol=1e-6)


def test_fednova_with_equal_steps_is_the_weighted_mean():
    model = {"w": f32(1.0, 2.0)}
    nova, plain = NormalisedMean(), MaskedMean(weighted=True)
    for values, weight in [(f32(0.5, 1.5), 3), (f32(0.25, -1), 9)]:
        nova.add({"w": Patch(values)}, weight, 8)
        plain.add({"w": Patch(values)}, weight)
    np.testing.assert_allclose(nova.finish(model)["w"], plain.finish(model)["w"], rtol=1e-6)


def test_fednova_normalises_parts_by_those_who_trained_them():
    model = {"w": f32(1.0, 1.0)}
    nova = NormalisedMean({"w": (2,)})
    nova.add({"w": Patch(f32(0.0, 0.0))}, 1, 2)
    nova.add({"w": Patch(f32(-2.0), (slice(0, 1),))}, 1, 6)
    # First value: tau_eff 4, mean of 1/2 and 3/6; second value: the first client only.
    np.testing.assert_allclose(nova.finish(model)["w"], [1 - 4 * (0.5 + 0.5) / 2, 0.0], atol=1e-7)


@pytest.mark.parametrize(
    ("values", "reason"),
    [(f32(1, np.nan), "not_finite"), (f32(np.inf, 0), "not_finite"), (f32(1e9, 0), "range")],
)
def test_an_unsound_update_is_refused_whole(values, reason):
    mean = MaskedMean()
    with pytest.raises(UpdateRefused, match="'b'") as refused:
        mean.add({"a": Patch(f32(5.0, 5.0)), "b": Patch(values)})
    assert reason == refused.value.reason
    model = {"a": f32(1, 1), "b": f32(2, 2)}
    assert model["a"].tobytes() == mean.finish(model)["a"].tobytes()


@pytest.mark.parametrize("weight", [0, -1, float("nan")])
def test_a_weight_must_count(weight):
    with pytest.raises(UpdateRefused, match="weight"):
        MaskedMean(weighted=True).add({"a": Patch(f32(1.0))}, weight)


def test_large_sums_that_cancel_do_not_depend_on_the_order():
    values = [60_000.0, -60_000.0, 1.23e-7, 3.1e-7, 2e-12, 7e-12]
    results = set()
    for order in itertools.permutations(values):
        new = fold(MaskedMean(), [({"w": Patch(f32(value))},) for value in order], {"w": f32(0.0)})
        results.add(new["w"].tobytes())
    assert 1 == len(results)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.sampled_from([1.0, 3.0, 1e6]))
def test_fixed_point_is_the_nearest_whole_number_at_every_size(values, weight):
    total = ExactSum((len(values),), 20)
    array = np.array(values, np.float32)
    total.add(array, weight, None, float(np.abs(array).max()))
    expected = [round(float(value) * weight * 2**20) * 2.0**-20 for value in array]
    assert expected == total.total().tolist()


def test_a_part_of_the_model_can_be_finished_alone():
    model = {"a": f32(1, 1), "b": f32(2, 2)}
    for mean in (MaskedMean(), NormalisedMean()):
        mean.add({"a": Patch(f32(5, 6)), "b": Patch(f32(7, 8))}, 2, *[3] * isinstance(mean, NormalisedMean))
        whole = mean.finish(model)
        for name in model:
            assert {name: whole[name].tolist()} == {
                key: value.tolist() for key, value in mean.finish({name: model[name]}).items()
            }


def test_an_update_that_was_refused_leaves_fednova_as_it_was():
    mean = NormalisedMean()
    with pytest.raises(UpdateRefused, match="'b'"):
        mean.add({"a": Patch(f32(5.0)), "b": Patch(f32(np.nan))}, 1, 2)
    assert [3.0] == mean.finish({"a": f32(3.0)})["a"].tolist()


PART = (slice(0, 1),)


def fresh(mean):
    """The same kind of mean, empty, and how to add to it."""
    if mean == "nova":
        return NormalisedMean({"w": (2,)}), {"weight": 1, "effective_steps": 2.0}
    return MaskedMean({"w": (2,)}, weighted=mean == "weighted"), {"weight": 1}


@pytest.mark.parametrize("where", [None, PART], ids=["whole", "part"])
@pytest.mark.parametrize(
    ("mean", "absurd"),
    [
        ("weighted", {"weight": 2**40}),
        ("weighted", {"weight": 2**63}),
        ("weighted", {"weight": 1e300}),
        ("uniform", {"weight": 2**40}),
        ("nova", {"weight": 2**40}),
        ("nova", {"effective_steps": 1e300}),
        ("nova", {"effective_steps": 1e-300}),
        ("nova", {"effective_steps": 1e20}),
        ("nova", {"effective_steps": 1e-12}),
    ],
)
def test_an_absurd_weight_is_refused_and_leaves_no_trace(mean, absurd, where):
    model, (sound, usual) = {"w": f32(5, 5)}, fresh(mean)
    tried, _ = fresh(mean)
    with pytest.raises(UpdateRefused) as refused:
        tried.add({"w": Patch(f32(1e-6) if where else f32(1e-6, 1e-6), where)}, **usual | absurd)
    assert refused.value.reason in ("weight", "steps", "range")
    for each in (sound, tried):
        each.add({"w": Patch(f32(1), PART)}, **usual)
        each.add({"w": Patch(f32(3, 4))}, **usual)
    assert sound.finish(model)["w"].tobytes() == tried.finish(model)["w"].tobytes()


def test_many_steps_in_a_part_are_refused_whole():
    nova, model = NormalisedMean({"v": (2,), "w": (2,)}), {"v": f32(9, 9), "w": f32(9, 9)}
    with pytest.raises(UpdateRefused, match="steps"):
        nova.add({"v": Patch(f32(1, 1)), "w": Patch(f32(1), PART)}, 1, 1e12)
    assert model["v"].tobytes() == nova.finish(model)["v"].tobytes()
    nova.add({"v": Patch(f32(1, 1))}, 1_000_000, 1e6)  # a large device, for many epochs


@pytest.mark.parametrize("patch", [Patch(f32(1, 2, 3)), Patch(f32(1, 2), PART), Patch(f32(1), (slice(3, 4),))])
@pytest.mark.parametrize("mean", ["uniform", "nova"])
def test_values_that_do_not_fit_are_refused_whole(mean, patch):
    made, usual = fresh(mean)
    with pytest.raises(UpdateRefused, match="'w'") as refused:
        made.add({"a": Patch(f32(7)), "w": patch}, **usual)
    assert "shape" == refused.value.reason
    assert [5.0] == made.finish({"a": f32(5)})["a"].tolist()


MOST = float(np.nextafter(np.float32(2**22), np.float32(0)))


@pytest.mark.parametrize("part", [False, True])
def test_one_client_cannot_use_up_the_range(part):
    """Who comes first does not decide who counts, also with the largest values that are taken."""
    values, results = [MOST] * 6 + [1.21, -0.5] + [-MOST] * 5, set()
    where = PART if part else None
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(values)
        mean = MaskedMean({"w": (1,)})
        for value in order:
            mean.add({"w": Patch(f32(value), where)})
        results.add(mean.finish({"w": f32(0)})["w"].tobytes())
    exact = np.float64(MOST) + np.float64(np.float32(1.21)) - 0.5
    assert {f32(exact / len(values)).tobytes()} == results


def test_weights_add_up_beyond_one_word():
    mean = MaskedMean({"w": (2,)}, weighted=True)
    for value in (0.0625, 0.0625, 0.0625, 0.125):
        mean.add({"w": Patch(f32(value), PART)}, 2**34 - 1)
    assert [0.078125, 9] == mean.finish({"w": f32(9, 9)})["w"].tolist()


@settings(deadline=None)
@given(
    st.lists(st.floats(-(2.0**22), 2.0**22, width=32, exclude_min=True, exclude_max=True), min_size=1),
    st.data(),
)
def test_large_sums_are_exact(values, data):
    order = data.draw(st.permutations(values))
    means = [MaskedMean({"w": ()}), MaskedMean({"w": (1,)})]
    for value, other in zip(values, order, strict=True):
        means[0].add({"w": Patch(np.float32(value))})
        means[1].add({"w": Patch(f32(other))})
    exact = sum(Fraction(round(Fraction(value) * 2**40), 2**40) for value in values)
    for mean, old in zip(means, [np.float32(0), f32(0)], strict=True):
        new = mean.finish({"w": np.asarray(old)})["w"]
        assert float(exact / len(values)) == pytest.approx(float(new.reshape(-1)[0]), rel=2e-7, abs=1e-12)
    assert (
        means[0].finish({"w": np.asarray(np.float32(0))})["w"].tobytes()
        == means[1].finish({"w": f32(0)})["w"].tobytes()
    )
