"""What the engine does when something does not work: too few updates, silence, trouble, a stop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.repeating import MISSING, SILENT
from tests.roles.test_engine import FAST, SECOND, SLOW, THIRD, kinds, opened
from tests.roles.world import World, member_of, report_of


def test_a_claim_without_an_update_closes_no_round() -> None:
    world = opened(FAST, SECOND, SLOW, num_participants=1, over_select=3.0)
    world.claim(SLOW, SLOW, 0)
    assert "Seal" in kinds(world.apply(ev.Settle()))
    world.answer()
    assert ("open", {SLOW: MISSING}) == (world.state.open.status, world.state.open.lost)
    assert "plan" in world.disk
    world.claim(SLOW, SLOW, 0)
    assert "Seal" not in kinds(world.apply(ev.Settle()))
    world.finish_task(FAST)
    world.tick()
    world.answer()
    world.answer()
    world.tick()
    assert [FAST] == [entry.client for entry in world.closed[0].clients]


def test_the_aggregators_open_a_round_again_that_has_too_few_updates() -> None:
    world = opened(FAST, SECOND, THIRD, min_reports=2)
    world.finish_task(FAST)
    world.claim(SECOND, SECOND, 0)
    world.apply(ev.Left(THIRD))
    world.tick()
    (sealed,) = world.answers
    world.answers.clear()
    assert ["Persist", "Open"] == kinds(world.apply(sealed))
    assert {FAST} == world.state.open.done
    assert [] == kinds(world.apply(sealed)), "an answer to an earlier seal counts no more"


def test_a_round_without_updates_repeats_and_then_pauses() -> None:
    world = opened(FAST, max_repeats=2)
    for repeats in (1, 2):
        world.now = world.state.open.deadline
        world.tick()
        assert (repeats, "running") == (world.state.open.repeats, world.state.phase)
    world.now = world.state.open.deadline
    world.tick()
    assert "held" == world.state.phase
    assert "round 1 got 0 of 1 updates in 3 deadlines" in world.state.message
    assert f"'{FAST}' did not answer" in world.state.message
    assert "`fedel runs resume`" in world.state.message
    assert world.waits.until is None
    world.run_to_the_end()
    assert "finished" == world.state.phase


def test_a_round_does_not_wait_for_a_silent_client() -> None:
    world = opened(FAST, SLOW)
    world.finish_task(FAST)
    world.apply(ev.Lost(SLOW))
    assert {SLOW: SILENT} == world.state.open.lost
    assert "Seal" in kinds(world.apply(ev.Settle()))


def test_a_silent_client_that_is_heard_again_counts() -> None:
    world = opened(FAST, SLOW)
    world.apply(ev.Lost(SLOW))
    world.apply(ev.Found(SLOW))
    assert {} == world.state.open.lost
    world.finish_task(FAST)
    assert "Seal" not in kinds(world.apply(ev.Settle()))


def test_trouble_holds_the_run_where_it_is() -> None:
    world = opened(FAST)
    world.finish_task(FAST)
    world.tick()
    world.answers.clear()
    world.apply(ev.Stuck("aggregator a:1 refused with NOT_FOUND"))
    assert ("held", "sealed") == (world.state.phase, world.state.open.status)
    assert "NOT_FOUND; `fedel runs resume` tries again" in world.state.message
    assert [] == kinds(world.apply(ev.Tick()))
    world.restart()
    assert [] == world.answers, "a restart does not resume it"
    assert "Seal" in kinds(world.apply(ev.Controlled("resume")))
    assert "running" == world.state.phase


@pytest.mark.parametrize("phase", ["paused", "held"])
def test_a_paused_run_with_an_open_round_can_be_stopped(phase: str) -> None:
    world = opened(FAST)
    world.apply(ev.Controlled("pause") if phase == "paused" else ev.Stuck("the disk is full"))
    assert (phase, True) == (world.state.phase, bool(world.state.message))
    world.apply(ev.Controlled("stop"))
    world.run_to_the_end()
    assert ("stopped", 1) == (world.state.phase, len(world.closed))


def test_trouble_in_a_stopping_run_stops_it() -> None:
    world = opened(FAST)
    world.apply(ev.Controlled("stop"))
    world.apply(ev.Stuck("the disk is full"))
    assert ("stopped", "stopped in round 1: the disk is full") == (world.state.phase, world.state.message)


def test_stop_now_gives_the_open_round_up() -> None:
    world = opened(FAST)
    assert ["Persist", "End"] == kinds(world.apply(ev.Controlled("stop_now")))
    assert "stopped in round 1, which was not closed" == world.state.message


def test_stop_now_closes_a_round_whose_model_is_made() -> None:
    world = opened(FAST, evaluate_every=1)
    world.finish_task(FAST)
    world.tick()
    world.answer()
    world.answer()
    world.apply(ev.Controlled("stop_now"))
    assert ("stopped", 1) == (world.state.phase, len(world.closed))


def test_divergence_is_named() -> None:
    world = opened(FAST, SLOW)
    report = replace(report_of(SLOW, 0), loss=math.nan)
    effects = world.apply(ev.Done(SLOW, ev.TaskResult(report)))
    assert ["Ignore"] == kinds(effects)
    world.apply(ev.Settle())
    assert world.waits.why.startswith(f"round 1: the training of client '{SLOW}' diverged: lower work.lr (")
    assert "loss is nan" in world.waits.why
    world.finish_task(FAST)
    assert "Seal" in kinds(world.apply(ev.Settle())), "nobody waits for it"


def diverge(world: World, *clients: str) -> list[ef.Effect]:
    effects: list[ef.Effect] = []
    for client in clients:
        report = replace(report_of(client, 0), loss=math.nan)
        world.apply(ev.Done(client, ev.TaskResult(report)))
        effects += world.apply(ev.Settle())
    return effects


def test_a_round_in_which_all_diverged_does_not_wait_for_its_deadline() -> None:
    world = opened(FAST, SLOW, max_repeats=2)
    for repeats in (1, 2):
        assert [] == kinds(diverge(world, FAST)), "the other may still deliver"
        sent = [effect.task.client for effect in diverge(world, SLOW) if isinstance(effect, ef.SendTask)]
        assert ([FAST, SLOW], repeats) == (sorted(sent), world.state.open.repeats)
        assert ({}, "running", 0.0) == (world.state.open.lost, world.state.phase, world.now)
    diverge(world, FAST, SLOW)
    assert "held" == world.state.phase
    told = world.state.message
    assert told.startswith(f"round 1: the training of client '{FAST}' and 1 more diverged: lower work.lr (")
    assert "3 times (rounds.max_repeats); `fedel runs resume` tries again" in told
    assert [] == kinds(world.apply(ev.Settle())), "it is held once"


def test_a_round_waits_for_its_deadline_where_a_client_has_no_task_yet() -> None:
    """Who lies about its training cannot pause the run of others at once."""
    world = opened(FAST, SLOW, num_participants=1)
    (client,) = world.state.open.tasks
    assert [] == kinds(diverge(world, client))
    world.now = world.state.open.deadline
    world.tick()
    assert 1 == world.state.open.repeats


def test_a_round_waits_where_a_client_that_diverged_has_gone() -> None:
    world = opened(FAST, SLOW)
    diverge(world, SLOW)
    world.apply(ev.Disconnected(SLOW))
    diverge(world, FAST)
    assert 0 == world.state.open.repeats


def test_a_test_that_nobody_asked_for_is_ignored() -> None:
    world = opened(FAST, SLOW, evaluate_every=1)
    for client in (FAST, SLOW):
        world.finish_task(client)
    world.tick()
    world.answer()
    world.answer()
    world.tick()
    ((evaluator, version),) = world.evaluators
    other = SLOW if evaluator == FAST else FAST
    assert ["Ignore"] == kinds(world.apply(ev.Evaluated(version, 1.0, 0.0, client=other)))
    assert ["Ignore"] == kinds(world.apply(ev.Evaluated(version, 7.0, 0.0, client=evaluator)))
    assert ([], "") == (world.closed, world.state.evaluation.evaluator)


def test_who_lets_a_test_pass_gets_no_other() -> None:
    world = opened(FAST, SLOW, evaluate_every=1)
    assert FAST == _untested_round(world)
    assert SLOW == _untested_round(world), "the other one is asked"
    assert [None, None] == [record.accuracy for record in world.closed]
    assert _untested_round(world, wait=False) is None, "nobody is left to ask, and nothing holds the round"


def test_who_missed_a_test_is_asked_last_when_it_joins_again() -> None:
    world = opened(FAST, SLOW, evaluate_every=1)
    assert FAST == _untested_round(world)
    world.apply(ev.Joined(member_of(FAST)))
    assert SLOW == _untested_round(world)


def test_a_late_answer_to_a_test_brings_another() -> None:
    world = opened(FAST, evaluate_every=1)
    assert FAST == _untested_round(world)
    world.apply(ev.Evaluated(1, 0.5, 0.5, client=FAST))
    assert FAST == _untested_round(world)


def test_who_only_joined_is_asked_for_no_test() -> None:
    world = opened(SLOW, FAST, evaluate_every=1)
    assert SLOW == _untested_round(world, trained=(SLOW,))


def _untested_round(world: World, trained: tuple[str, ...] = (FAST, SLOW), wait: bool = True) -> str | None:
    """A round goes by whose test nobody answers; returns who was asked."""
    for client in trained:
        world.finish_task(client)
    world.tick(0.0 if trained == (FAST, SLOW) else 1e6)
    world.answer()
    world.answer()
    world.tick()
    asked = world.evaluators.pop()[0] if world.evaluators else None
    if wait:
        world.tick(1e6)
        world.tick()
    return asked


def test_updates_of_others_are_not_committed() -> None:
    world = opened(FAST)
    world.finish_task(FAST)
    world.tick()
    stranger = report_of("evil", 0)
    effects = world.apply(ev.Sealed(0, (stranger, report_of(FAST, 0))))
    assert ef.Commit(0, (FAST,)) in effects


def test_a_record_that_cannot_be_made_does_not_hold_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("evil")

    monkeypatch.setattr("fedel.roles.closing.round_record", broken)
    world = opened(FAST)
    world.run_to_the_end()
    assert "finished" == world.state.phase
    assert "KeyError: 'evil'" in world.closed[0].trouble


def test_a_client_that_never_counted_is_forgotten() -> None:
    world = World(opened(FAST).engine)
    world.apply(ev.Joined(member_of(SLOW)))
    assert ["Persist"] == kinds(world.apply(ev.Forgotten(SLOW)))
    assert {} == world.state.members


def test_a_clock_that_was_set_back_gives_no_negative_seconds() -> None:
    world = opened(FAST)
    world.now -= 172_800
    world.run_to_the_end()
    assert all(r.latency_seconds >= 0 and r.collect_seconds >= 0 for r in world.closed)


def test_a_stop_says_who_when_and_why() -> None:
    world = opened(FAST)
    world.apply(ev.Controlled("stop", "operator 'ada'", "the data is wrong: see ticket 7"))
    said = "stopped by operator 'ada': the data is wrong: see ticket 7; it ends after the open round"
    assert world.state.message.startswith(said)
    world.restart()
    world.run_to_the_end()
    assert "stopped by operator 'ada' after round 1: the data is wrong: see ticket 7" == world.state.message


def test_stop_now_and_pause_say_who_and_why() -> None:
    world = opened(FAST)
    world.apply(ev.Controlled("pause", "operator 'ada'", "lunch"))
    assert "paused by operator 'ada': lunch; `fedel runs resume` goes on" == world.state.message
    world.apply(ev.Controlled("stop_now", "operator 'bob'"))
    assert "stopped by operator 'bob' in round 1, which was not closed" == world.state.message


def test_a_run_that_an_older_version_was_stopping_ends_in_order() -> None:
    world = opened(FAST)
    world.apply(ev.Controlled("stop"))
    world.state = replace(world.state, message="stops after the open round")
    world.run_to_the_end()
    assert ("stopped", "stopped after round 1") == (world.state.phase, world.state.message)


def test_a_round_that_needs_more_clients_than_there_are_says_so_at_once() -> None:
    world = opened(FAST, SECOND, min_reports=3)
    assert "a round needs 3 updates (rounds.min_reports), and 2 can come" == world.waits.why
    world.apply(ev.Joined(member_of(SLOW)))
    world.apply(ev.Settle())
    assert "" == world.waits.why


def test_min_clients_holds_for_the_first_round_only() -> None:
    world = opened(FAST, SECOND, min_clients=2)
    world.finish_task(FAST)
    world.finish_task(SECOND)
    world.tick()
    world.answer()
    world.answer()
    world.apply(ev.Left(SECOND))
    world.tick()
    assert (1, {FAST}) == (world.state.open.round_num, set(world.state.open.tasks))
