"""What is trained within T_th: by scope, with and without steps that fit it, over slow links."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedel.core.budgeted import MAX_FILL, Choice, Prices, choose, choose_whole
from fedel.core.steps import MIN_SHARE
from fedel.core.timing import full_step
from fedel.types import AS_PROFILED, Role, Speed, UploadSettings, Window
from tests.strategies.fakes import profile, spec

SPEC = spec()
IMPORTANCE = {t.name: 1.0 + n % 5 for n, t in enumerate(SPEC.weights)}
STEPS = 40


def prices(slowness: float, scope: str = "round", speed: Speed = AS_PROFILED, num_steps: int = STEPS) -> Prices:
    """Of a device so many times slower than the one whose whole step is T_th."""
    t_th = full_step(profile(1)).total("train")
    return Prices(SPEC, profile(slowness), scope, t_th, num_steps, batch_size=32, speed=speed)


def spent(of: Prices, window: Window, choice: Choice) -> float:
    step = of.step_seconds(choice.selected, window)
    return choice.batches * step + of.once_seconds(choice.selected, window)


windows = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda w: Window(min(w), max(w)))


@settings(deadline=None)
@given(windows, st.floats(1, 20), st.integers(20, 100))
def test_steps_that_fit_use_t_th_and_never_more(window: Window, slowness: float, num_steps: int) -> None:
    of = prices(slowness, num_steps=num_steps)
    choice = choose_whole(of, window, fit_steps=True) or choose(of, window, IMPORTANCE, fit_steps=True)
    used = spent(of, window, choice) / of.round_seconds
    assert choice.in_budget
    assert used <= 1 + 1e-6
    # What is left is not worth a step, unless the window is so cheap that the limit of steps ends it.
    left = (1 - used) * of.round_seconds / of.step_seconds(choice.selected, window)
    assert left < MIN_SHARE + 1e-6 or choice.num_steps == MAX_FILL * num_steps


def test_where_a_whole_step_does_not_fit_a_part_of_one_does() -> None:
    of, window = prices(40, num_steps=3), Window(1, 6)
    choice = choose(of, window, IMPORTANCE, fit_steps=True)
    assert (1, True) == (choice.num_steps, choice.in_budget)
    assert MIN_SHARE <= choice.last_share < 1
    assert 0.9 < spent(of, window, choice) / of.round_seconds <= 1 + 1e-6
    slower = choose(prices(400, num_steps=3), window, IMPORTANCE, fit_steps=True)
    assert (1, MIN_SHARE, False) == (slower.num_steps, slower.last_share, slower.in_budget)


@settings(deadline=None)
@given(windows, st.floats(2, 20))
def test_a_step_is_worth_its_way_in(window: Window, slowness: float) -> None:
    of = prices(slowness)
    choice = choose(of, window, IMPORTANCE, fit_steps=True)
    at_front = {t.name for t in SPEC.weights_in(window.front, window.front)}
    way_in, front = of.step_seconds((), window), of.step_seconds(at_front, window)
    trained = of.step_seconds(choice.selected, window) - way_in
    assert trained > 0.4 * min(way_in, front - way_in)


def test_a_plan_keeps_its_steps() -> None:
    assert STEPS == choose(prices(4), Window(1, 6), IMPORTANCE).num_steps


def test_a_probe_leaves_less_for_the_steps() -> None:
    of, window = prices(2), Window(1, 4)
    without, with_probe = (
        choose(of, window, IMPORTANCE, probe_seconds=seconds, fit_steps=True)
        for seconds in (0.0, 0.3 * of.round_seconds)
    )
    used = [spent(of, window, choice) / of.round_seconds for choice in (without, with_probe)]
    assert used == [pytest.approx(1.0, abs=0.03), pytest.approx(0.7, abs=0.03)]


def test_a_slow_uplink_buys_fewer_bytes() -> None:
    window = Window(1, 4)
    free, slow = prices(2), prices(2)
    model = float(SPEC.num_bytes)
    rate = model / (2 * slow.round_seconds)
    slow = replace(slow, speed=Speed(up_rate=rate))
    sent = [of.bytes_up(choose(of, window, IMPORTANCE, fit_steps=True).selected, window) for of in (free, slow)]
    assert sent[1] < sent[0]
    choice = choose(slow, window, IMPORTANCE, fit_steps=True)
    assert spent(slow, window, choice) == pytest.approx(slow.round_seconds, rel=0.05)
    assert slow.once_seconds(choice.selected, window) > 0.05 * slow.round_seconds


@pytest.mark.parametrize("upload", [UploadSettings("fp16"), UploadSettings("int8"), UploadSettings("topk")])
def test_compression_buys_more_tensors_over_a_slow_uplink(upload: UploadSettings) -> None:
    window = Window(1, 4)
    plain = prices(2)
    plain = replace(plain, speed=Speed(up_rate=SPEC.num_bytes / (2 * plain.round_seconds)))
    smaller = replace(plain, upload=upload)
    choices = [choose(of, window, IMPORTANCE, fit_steps=True) for of in (plain, smaller)]
    # Tensors or steps: whichever of them the time that is saved pays for.
    trained = [choice.batches * sum(IMPORTANCE[name] for name in choice.selected) for choice in choices]
    assert trained[1] > 1.1 * trained[0]
    assert spent(smaller, window, choices[1]) <= smaller.round_seconds * (1 + 1e-6)
    assert smaller.bytes_down(window) == plain.bytes_down(window)


def test_an_upload_costs_the_bytes_that_compression_makes() -> None:
    of, window = replace(prices(1), upload=UploadSettings("int8")), Window(2, 4)
    exits = of.spec.exits_for(window.end, window.front)
    sent = [
        t
        for t in SPEC.tensors
        if (t.name in IMPORTANCE and t.block in window) or (t.role is Role.EXIT and t.block in exits)
    ]
    statistics = [t for t in SPEC.tensors if t.role is Role.BUFFER and t.block in window]
    selected = {t.name for t in SPEC.weights if t.block in window}
    expected = sum(t.size + 4 for t in sent) + sum(t.num_bytes for t in statistics)
    assert statistics
    assert expected == of.bytes_up(selected, window)


def test_what_comes_down_counts_too() -> None:
    shallow, deep = Window(1, 2), Window(1, 6)
    of = replace(prices(1), speed=Speed(down_rate=1000.0))
    assert of.bytes_down(shallow) < of.bytes_down(deep) <= SPEC.num_bytes
    assert of.once_seconds((), shallow) < of.once_seconds((), deep)


@pytest.mark.parametrize("scope", ["backward", "train"])
def test_other_scopes_count_no_transfers(scope: str) -> None:
    of = replace(prices(1, scope), speed=Speed(down_rate=1.0, up_rate=1.0, other_seconds=9.0))
    assert 0.0 == of.once_seconds(IMPORTANCE, Window(1, 6)) == of.upload_seconds(IMPORTANCE, Window(1, 6))
    assert prices(1, scope).block_seconds() == of.block_seconds()


def test_measured_slowness_is_in_every_price() -> None:
    base = prices(1)
    twice = replace(base, profile=base.profile.scaled(2), speed=Speed(slowness=2.0, probe_slowness=3.0))
    window = Window(2, 4)
    assert twice.step_seconds(IMPORTANCE, window) == pytest.approx(2 * base.step_seconds(IMPORTANCE, window))
    assert twice.probe(window).total("train") == pytest.approx(3 * base.probe(window).total("train"))
