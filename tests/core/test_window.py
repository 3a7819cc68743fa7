import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedel.core.window import advance, slide
from fedel.types import Window

ORIN_VGG16 = [
    260.1, 760.4, 438.5, 669.3, 676.6, 1414.4, 1476.1, 2690.2, 5371.7, 5494.8, 5306.4, 5311.0, 5467.9, 33.4
]  # fmt: skip
"""T^b of VGG16 at 32x32 on a Jetson Orin, microseconds (measured, batch 4)."""


def test_the_front_moves_by_what_the_budget_pays_for():
    seconds = [1.0] * 9
    window, fronts = None, []
    for _ in range(4):
        window = slide(window, {window.end} if window else (), seconds, 3)
        fronts.append(window.front)
    assert [3, 6, 9, 3] == fronts


def test_figure_7a_the_front_adds_from_the_previous_front():
    seconds = [1, 1, 1, 1, 2, 2, 2, 2, 9]
    assert 8 == slide(Window(1, 4), {1}, seconds, 8).front
    assert 8 == slide(Window(1, 4), {1}, seconds, 6.5).front
    assert 7 == slide(Window(1, 4), {1}, seconds, 6).front


def test_figure_7c_leading_unselected_blocks_are_left_behind_but_holes_stay():
    assert 4 == slide(Window(2, 6), {4, 6}, [1] * 12, 2).end


def test_nothing_selected_moves_the_end_past_the_front():
    assert Window(5, 6) == slide(Window(2, 4), (), [1] * 12, 2)


def test_a_budget_for_everything_trains_the_whole_model_every_round():
    total = sum(ORIN_VGG16)
    window = slide(None, (), ORIN_VGG16, total)
    assert Window(1, 14) == window
    assert Window(1, 14) == slide(window, {3}, ORIN_VGG16, total)
    assert Window(1, 14) == slide(None, (), ORIN_VGG16, total * (1 + 1e-9))


def test_a_block_beyond_the_budget_is_a_window_of_its_own():
    seconds = [1, 1, 50, 1]
    assert 3 == slide(Window(1, 2), {2}, seconds, 2).front
    assert Window(3, 4) == slide(Window(2, 3), {3}, seconds, 2)


@pytest.mark.parametrize(
    ("slowness", "fronts"), [(1, [14]), (2, [10, 14]), (3, [9, 12, 14]), (4, [9, 11, 13, 14])]
)
def test_fronts_of_vgg16_on_the_measured_orin(slowness, fronts):
    seconds = [slowness * t for t in ORIN_VGG16]
    budget, window, seen = sum(ORIN_VGG16), None, []
    for _ in fronts:
        window = slide(window, {window.front} if window else (), seconds, budget)
        seen.append(window.front)
    assert fronts == seen


def test_the_disjoint_variant_starts_where_the_last_window_stopped():
    assert Window(4, 6) == slide(Window(1, 3), {1, 2, 3}, [1] * 9, 3, "disjoint")


def test_without_rollback_the_last_window_stays():
    assert Window(7, 9) == slide(Window(7, 9), {8}, [1] * 9, 3, "no-rollback")


def test_an_unknown_variant_is_named():
    with pytest.raises(ValueError, match="rolling"):
        slide(None, (), [1], 1, "rolling")


@given(
    seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=20),
    budget=st.floats(0.01, 50),
    variant=st.sampled_from(["fedel", "disjoint"]),
    data=st.data(),
)
def test_a_cycle_covers_every_block_then_starts_again(seconds, budget, variant, data):
    window, covered = None, set()
    for _ in range(len(seconds)):
        chosen = ()
        if window is not None:
            chosen = data.draw(st.sets(st.integers(window.end, window.front)))
        previous = window
        window = slide(window, chosen, seconds, budget, variant)
        assert 1 <= window.end <= window.front <= len(seconds)
        if previous is not None:
            assert window.front > previous.front
            assert previous.end <= window.end <= previous.front + 1
        covered.update(range(window.end, window.front + 1))
        if window.front == len(seconds):
            break
    assert set(range(1, len(seconds) + 1)) == covered
    assert Window(1, advance(0, seconds, budget)) == slide(window, {window.front}, seconds, budget, variant)
