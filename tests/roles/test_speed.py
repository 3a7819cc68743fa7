"""One client cannot move T_th for all: what the planner believes about speed."""

from __future__ import annotations

from dataclasses import replace

from fedel.core.timing import budget, full_step, full_steps
from fedel.roles.run_state import Member, TaskResult
from fedel.roles.speed import believed, learned
from fedel.testing import profile
from fedel.types import AS_PROFILED, Report, Speed, StepCost, Task
from tests.roles.world import World, engine_of

HONEST = [Member(f"c{i}", 10, profile(1 + i), "orin") for i in range(4)]
LIAR = Member("a", 10, profile(1e-3), "orin")


def seconds_of(members: list[Member], speeds: dict[str, Speed] | None = None) -> list[float]:
    return [full_step(view.profile).total("train") for view in believed(members, speeds or {})]


def test_a_sane_fleet_is_believed_to_the_bit() -> None:
    assert [member.view for member in HONEST] == believed(HONEST, {})


def test_a_liar_is_as_fast_as_a_third_of_the_median_of_its_type() -> None:
    honest = [full_step(member.profile).total("train") for member in HONEST]
    seen = seconds_of([LIAR, *HONEST])
    assert honest == seen[1:]
    assert abs(seen[0] / (honest[1] / 3) - 1) < 1e-6


def test_one_profile_does_not_move_the_budget_of_others() -> None:
    honest = budget(full_steps([member.profile for member in HONEST]))
    others = replace(LIAR, device_type="of its own")
    for liar in (LIAR, others):
        views = believed([liar, *HONEST], {})
        assert honest / 3 <= budget(full_steps([view.profile for view in views])) <= honest


def test_measured_seconds_correct_a_profile_that_is_far_too_fast() -> None:
    slow = Report("c0", 0, 10, 4, 4.0, 0.5, cost=StepCost(0.1, 0.2), step_seconds=30.0)
    plain = seconds_of(HONEST)
    corrected = seconds_of(HONEST, {"c0": learned(AS_PROFILED, TaskResult(slow))})
    assert abs(corrected[0] / plain[0] - 100) < 1e-6
    assert plain[1:] == corrected[1:]


def test_a_busy_machine_changes_nothing_in_a_run_that_keeps_to_its_plan() -> None:
    def tasks_of_round_2(train_seconds: float) -> list[Task]:
        world = World(engine_of("fedel", evaluate_every=0), train_seconds=train_seconds)
        for _ in range(10):
            world.behave()
            if world.state.open is not None and world.state.open.round_num == 1:
                return list(world.state.open.plan.tasks)
        raise AssertionError(world.waits.why)

    assert tasks_of_round_2(1.0) == tasks_of_round_2(1000.0)


def test_an_unknown_link_is_taken_to_be_as_those_of_others() -> None:
    speeds = {
        "a": Speed(down_rate=6e6, up_rate=2e6),
        "b": Speed(down_rate=4e6, up_rate=1e6),
        "c": Speed(down_rate=8e6, up_rate=4e6),
        "d": Speed(slowness=2.0, up_rate=3e6),
    }
    members = [replace(HONEST[0], client=name) for name in (*speeds, "new")]
    found = {m.client: view.speed for m, view in zip(members, believed(members, speeds), strict=True)}
    assert (found["d"].down_rate, found["d"].up_rate, found["d"].slowness) == (6e6, 3e6, 2.0)
    assert found["a"] == speeds["a"]
    assert found["new"] == AS_PROFILED  # nothing was ever measured: it makes its first round as profiled
