"""The gate of a session: nothing an agent says about itself can hinder a plan or a record."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedel.job import RunConfig
from fedel.records import DeviceUsage
from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles import gate_session as gate
from fedel.roles.coordinator import RoundEngine
from fedel.roles.planner import RoundPlanner
from fedel.roles.run_state import Member, RunState, TaskResult
from fedel.strategies import METHODS
from fedel.testing import profile, spec
from fedel.types import (
    BlockBytes,
    BlockTime,
    MemoryUse,
    Participant,
    Report,
    StepCost,
    TensorTime,
    TimingProfile,
    WidthTime,
    Window,
)
from fedel.wire.codec import participant_to_pb, task_to_pb

SPEC = spec()
GOOD = profile()
MEMBER = Member("a", 10, GOOD, "fake")
TASK = Participant("a", 0, num_samples=10, max_steps=10, max_effective_steps=100.0)
RESULT = TaskResult(Report("a", 0, 10, 4, 4.0, 0.5), 100, 200, {"train": 1.0})


def changed(**fields: object) -> TimingProfile:
    return replace(GOOD, **fields)


def first_tensor(**fields: object) -> TimingProfile:
    return replace(GOOD, tensors=(replace(GOOD.tensors[0], **fields), *GOOD.tensors[1:]))


def first_block(**fields: object) -> TimingProfile:
    return replace(GOOD, blocks=(replace(GOOD.blocks[0], **fields), *GOOD.blocks[1:]))


def memory(**fields: object) -> TimingProfile:
    use = MemoryUse(1000, 10, 1, (BlockBytes(1, 1, 1, 1, 1),) * SPEC.num_blocks, limit_bytes=2000)
    return changed(memory=replace(use, **fields))


def test_a_good_join_passes() -> None:
    assert "" == gate.objection_to_join(SPEC.digest, MEMBER, SPEC)
    assert "" == gate.objection_to_join(SPEC.digest, replace(MEMBER, profile=memory()), SPEC)


@pytest.mark.parametrize(
    "bad",
    [
        first_tensor(block=99),
        first_tensor(block=2),
        first_tensor(name="evil"),
        first_tensor(grad_seconds=math.nan),
        first_tensor(update_seconds=-1.0),
        first_tensor(update_seconds=1e308),
        first_block(forward_seconds=math.inf),
        first_block(exit_forward_seconds=-1.0),
        first_block(exit_backward_seconds=math.nan),
        first_block(frozen_forward_seconds=-5.0),
        changed(overhead_seconds=-1000.0),
        changed(overhead_seconds=math.nan),
        changed(calibration=0.0),
        changed(calibration=math.inf),
        changed(batch_size=0),
        changed(widths=(WidthTime(0.0, 1.0, 1.0),)),
        changed(widths=(WidthTime(1.5, 1.0, 1.0),)),
        changed(widths=(WidthTime(0.5, math.nan, 1.0),)),
        changed(widths=(WidthTime(0.5, 1.0, 1.0),) * 1000),
        changed(tensors=GOOD.tensors[1:]),
        changed(tensors=(*GOOD.tensors, GOOD.tensors[0])),
        changed(blocks=GOOD.blocks[1:]),
        changed(device="x" * 4_000_000),
        GOOD.scaled(1e-12),
        memory(base_bytes=-1),
        memory(input_bytes=2**62),
        memory(limit_bytes=-1),
        memory(optimiser_values=-1),
        memory(optimiser_values=10**9),
        memory(blocks=()),
        memory(blocks=(BlockBytes(1, 1, 1, 1, -1),) * SPEC.num_blocks),
    ],
)
def test_a_bad_profile_is_refused(bad: TimingProfile) -> None:
    objection = gate.objection_to_join(SPEC.digest, replace(MEMBER, profile=bad), SPEC)
    assert objection.startswith("the agent's timing profile")
    assert len(objection) < 1000


def test_samples_and_digest_are_checked() -> None:
    for num_samples in (-1, 0, 2**62):
        assert "samples" in gate.objection_to_join(SPEC.digest, replace(MEMBER, num_samples=num_samples), SPEC)
    assert len(gate.objection_to_join("x" * 4_000_000, MEMBER, SPEC)) < 1000


@pytest.mark.parametrize(
    "hello",
    [
        ("", "fake", "1.0", 0),
        ("a\x1b[2J", "fake", "1.0", 0),
        ("a", "x" * 2_200_000, "1.0", 0),
        ("a", "two\nlines", "1.0", 0),
        ("a", "fake", "\x07", 0),
        ("a", "fake", "1.0", -1),
        ("a", "fake", "1.0", 2**62),
    ],
)
def test_a_bad_hello_is_refused(hello: tuple[str, str, str, int]) -> None:
    assert gate.objection_to_hello(*hello)
    assert "" == gate.objection_to_hello("a", "", "", 0)


@pytest.mark.parametrize(
    "bad",
    [
        replace(RESULT, bytes_up=-5),
        replace(RESULT, bytes_down=2**62),
        replace(RESULT, phases={"train": math.nan}),
        replace(RESULT, phases={"upload": -1.0}),
        replace(RESULT, report=replace(RESULT.report, loss_square=-1.0)),
        replace(RESULT, report=replace(RESULT.report, num_steps=11)),
    ],
)
def test_a_bad_result_is_refused(bad: TaskResult) -> None:
    assert "" == gate.objection_to_result(RESULT, SPEC, TASK)
    assert gate.objection_to_result(bad, SPEC, TASK)


def test_readings_that_no_sensor_gives_are_left_out() -> None:
    odd = DeviceUsage(power_watts=5.0, energy_joules=-1.0, temperature_celsius=math.nan)
    assert DeviceUsage(power_watts=5.0) == gate.plausible(odd)


def test_progress() -> None:
    assert "" == gate.objection_to_progress("train", Window(1, 2), 0, 0, SPEC)
    assert gate.objection_to_progress("x" * 4_000_000, None, 0, 0, SPEC)
    assert gate.objection_to_progress("train", Window(5, 99), 0, 0, SPEC)
    assert gate.objection_to_progress("train", None, -1, 0, SPEC)


def test_scores() -> None:
    assert "" == gate.objection_to_score(0.5, 2.0, 1.0)
    for bad in ((7.0, 0.5, 1.0), (math.nan, 0.5, 1.0), (0.5, math.inf, 1.0), (0.5, 0.5, -1.0)):
        assert gate.objection_to_score(*bad)


SECONDS = st.one_of(
    st.floats(0, 1e4), st.sampled_from([0.0, 1e-300, 1e-12, 1e4, -1.0, math.nan, math.inf, 1e308])
)
SANE = st.floats(1e-6, 10.0)


def profiles(seconds: st.SearchStrategy[float]) -> st.SearchStrategy[TimingProfile]:
    weights = SPEC.weights
    return st.builds(
        TimingProfile,
        device=st.just("d"),
        model=st.just("m"),
        batch_size=st.integers(-1, 2**40),
        tensors=st.tuples(
            *(st.builds(TensorTime, st.just(t.name), st.just(t.block), seconds, seconds) for t in weights)
        ),
        blocks=st.tuples(*(st.builds(BlockTime, seconds, seconds, seconds, seconds) for _ in SPEC.block_names)),
        widths=st.lists(st.builds(WidthTime, st.floats(-0.5, 1.5), seconds, seconds), max_size=3).map(tuple),
        overhead_seconds=seconds,
        calibration=st.just(1.0),
    )


MEMBERS = st.tuples(
    st.one_of(st.integers(1, 10**9), st.integers()), st.one_of(profiles(SANE), profiles(SECONDS))
)
NUMBER = st.one_of(st.floats(0, 1e30), st.floats())
REPORTS = st.builds(
    Report,
    client=st.just("a"),
    round_num=st.just(0),
    num_samples=st.integers(),
    num_steps=st.integers(0, 10),
    effective_steps=st.one_of(st.floats(0, 100), st.floats()),
    loss=NUMBER,
    loss_square=NUMBER,
    update_norm=NUMBER,
    cost=st.builds(StepCost, SECONDS, SECONDS),
    probe=st.builds(StepCost, SECONDS, SECONDS),
    train_seconds=SECONDS,
    peak_memory_bytes=st.integers(-1, 2**50),
    window=st.one_of(st.none(), st.builds(Window, st.integers(-1, 7), st.integers(-1, 7))),
    resets=st.integers(0, 2**33),
    over_budget=st.booleans(),
)
STRATEGIES = sorted(METHODS)


@settings(max_examples=60, deadline=None)
@given(
    members=st.lists(MEMBERS, min_size=1, max_size=4),
    report=REPORTS,
    strategy=st.sampled_from(STRATEGIES),
    num_steps=st.sampled_from([0, 5]),
)
def test_what_passes_the_gate_can_be_planned_and_recorded(members, report, strategy, num_steps) -> None:
    """By every method, and the round after it too."""
    table = {
        "strategy": {"name": strategy},
        "rounds": {"num_rounds": 2, "evaluate_every": 0},
        "work": {"num_steps": num_steps, "batch_size": 1},
    }
    engine = RoundEngine(RoundPlanner(RunConfig.parse(table), SPEC))
    state = RunState()
    for name, (num_samples, timing) in zip("abcd", members, strict=False):
        member = Member(name, num_samples, timing, "fake")
        if not gate.objection_to_join(SPEC.digest, member, SPEC):
            state, _ = engine.apply(state, ev.Joined(member), 0.0)
    for round_num in (0, 1):
        state, effects = engine.apply(state, ev.Tick(), 0.0)
        if state.open is None:
            return
        check_plan(engine, effects)
        tasks = state.open.tasks
        for name, task in tasks.items():
            mine = replace(report, client=name, round_num=round_num)
            state, _ = engine.apply(state, ev.Done(name, TaskResult(mine)), 1.0)
            participant = engine.planner.participant(task, state.members[name].num_samples)
            if gate.objection_to_report(mine, SPEC, participant):
                assert name not in state.open.done
        reports = tuple(state.open.results[name].report for name in sorted(state.open.done))
        if not reports:
            return
        state, _ = engine.apply(state, ev.CloseNow(), 2.0)
        state, _ = engine.apply(state, ev.Sealed(round_num, reports), 3.0)
        counts = dict.fromkeys((t.name for t in SPEC.tensors), 1)
        committed = ev.Committed(round_num, round_num + 1, dict.fromkeys(counts, 0.1), counts)
        state, effects = engine.apply(state, committed, 4.0)
        (record,) = [effect.record for effect in effects if isinstance(effect, ef.Close)]
        assert record.to_json()
        assert not record.trouble


def check_plan(engine: RoundEngine, effects: list[ef.Effect]) -> None:
    """Everything of it can be sent."""
    for effect in effects:
        if isinstance(effect, ef.SendTask):
            assert math.isfinite(effect.task.budget_seconds)
            assert effect.task.budget_seconds > 0
            assert math.isfinite(effect.deadline_seconds)
            task_to_pb(effect.task, "r", SPEC, 0, -1, effect.memory, effect.deadline_seconds)
        if isinstance(effect, ef.Open):
            assert [participant_to_pb(each) for each in effect.participants]


def test_the_steps_of_a_client_with_very_many_samples_can_be_sent() -> None:
    """By epochs, where a method may add steps to those of a fast client."""
    work = {"num_steps": 0, "num_epochs": 5, "batch_size": 1}
    table = {"strategy": {"name": "pyramidfl"}, "rounds": {"evaluate_every": 0}, "work": work}
    engine = RoundEngine(RoundPlanner(RunConfig.parse(table), SPEC))
    state = RunState()
    for name, num_samples in (("a", 1), ("b", 10**9)):
        state, _ = engine.apply(state, ev.Joined(Member(name, num_samples, GOOD, "fake")), 0.0)
    state, effects = engine.apply(state, ev.Tick(), 0.0)
    check_plan(engine, effects)
    assert state.open is not None
    assert state.open.plan.deadline_seconds == engine.run.rounds.max_deadline_seconds
