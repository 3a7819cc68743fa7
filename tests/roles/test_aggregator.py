"""What a shard's round decides about uploads, seals and commits, without files or sockets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedel.errors import UpdateRefused
from fedel.roles.aggregator import Content, ShardRound, Upload, Verdict
from fedel.types import Participant


def upload(client: str, round_num: int = 3, digest: str = "d1") -> Upload:
    return Upload(client, Content(round_num, digest))


def shard_round(**options: Any) -> ShardRound:
    """Round 3, with tasks for clients a and b in it and in the round before."""
    tasks = [Participant(client, n, 10, 5, 5.0) for client in ("a", "b") for n in (2, 3)]
    return ShardRound("night", 3, participants=options.pop("participants", tasks), **options)


def refusal(round_: ShardRound, one: Upload) -> str:
    with pytest.raises(UpdateRefused) as caught:
        round_.admit(one)
    return caught.value.reason


def test_new_then_duplicate() -> None:
    round_ = shard_round()
    assert Verdict.TAKE is round_.admit(upload("a")) is round_.admit(upload("a"))
    round_.accept(upload("a"))
    assert Verdict.DUPLICATE is round_.admit(upload("a"))
    assert Verdict.TAKE is round_.admit(upload("b"))
    assert ["a"] == round_.clients


def test_other_content_is_a_conflict() -> None:
    round_ = shard_round(accepted=[upload("a")])
    assert "conflict" == refusal(round_, upload("a", digest="d2"))


@pytest.mark.parametrize(
    ("max_staleness", "sealed", "round_num", "reason"),
    [
        (0, False, 4, "early"),
        (0, False, 2, "late"),
        (0, True, 3, "late"),
        (1, False, 4, "early"),
        (1, False, 1, "late"),
        (1, True, 2, "sealed"),
        (1, True, 3, "sealed"),
        (2, False, 0, "late"),
        (2, True, 1, "sealed"),
    ],
)
def test_round_of_an_upload(max_staleness: int, sealed: bool, round_num: int, reason: str) -> None:
    round_ = shard_round(max_staleness=max_staleness, sealed=sealed)
    assert reason == refusal(round_, upload("a", round_num))


def test_late_upload_counts_once() -> None:
    round_ = shard_round(max_staleness=1, counted_before=[("a", Content(2, "d1"))])
    assert Verdict.DUPLICATE is round_.admit(upload("a", 2))
    assert "conflict" == refusal(round_, upload("a", 2, "d2"))
    assert Verdict.TAKE is round_.admit(upload("b", 2))
    round_.accept(upload("b", 2))
    assert "conflict" == refusal(round_, upload("b", 3))


def test_sealed_round_confirms_what_it_has() -> None:
    round_ = shard_round(accepted=[upload("a")])
    round_.seal()
    assert Verdict.DUPLICATE is round_.admit(upload("a"))
    assert "late" == refusal(round_, upload("b"))


def test_requests_of_other_rounds() -> None:
    round_ = shard_round()
    assert [True, False] == [round_.is_answered(number) for number in (2, 3)]
    for number in (1, 4):
        with pytest.raises(UpdateRefused, match=f"is at round 3 of run .*, the database at {number}") as caught:
            round_.is_answered(number)
        assert "other_round" == caught.value.reason


def test_close_with_some_of_the_clients() -> None:
    round_ = shard_round(accepted=[upload("b"), upload("a"), upload("c")])
    assert {"a": Content(3, "d1"), "c": Content(3, "d1")} == round_.close_with(["c", "a"])
    with pytest.raises(UpdateRefused, match="no update of: y, z"):
        round_.close_with(["a", "z", "y"])


@given(
    steps=st.lists(
        st.one_of(
            st.just("seal"),
            st.just("commit"),
            st.builds(upload, st.sampled_from("ab"), st.integers(0, 4), st.sampled_from(["d1", "d2"])),
        ),
        max_size=40,
    ),
    max_staleness=st.integers(0, 3),
)
def test_every_update_counts_at_most_once(steps: list[str | Upload], max_staleness: int) -> None:
    """Whatever comes in whatever order, no client counts twice with one round's work, nor too late."""
    everyone = [Participant(client, number, 10, 5, 5.0) for client in "ab" for number in range(41)]
    options: dict[str, Any] = {"max_staleness": max_staleness, "participants": everyone}
    round_, counted = ShardRound("night", 0, **options), []
    before: list[list[tuple[str, Content]]] = []
    for step in steps:
        if step == "seal":
            round_.seal()
        elif step == "commit" and round_.clients:
            before.append(list(round_.close_with(round_.clients).items()))
            last = [pair for made in before[-max(1, max_staleness) :] for pair in made]
            round_ = ShardRound("night", round_.number + 1, counted_before=last, **options)
        elif isinstance(step, Upload):
            try:
                verdict = round_.admit(step)
            except UpdateRefused:
                continue
            if verdict is Verdict.TAKE:
                assert not round_.sealed
                assert 0 <= round_.number - step.content.round_num <= max_staleness
                round_.accept(step)
                counted.append((step.client, step.content.round_num))
            assert Verdict.DUPLICATE is round_.admit(step)
    assert len(counted) == len(set(counted))


def test_no_version_of_nothing() -> None:
    with pytest.raises(UpdateRefused) as caught:
        shard_round(accepted=[upload("a")]).close_with([])
    assert "empty" == caught.value.reason


def test_ended_run() -> None:
    round_ = shard_round(accepted=[upload("a")])
    round_.end()
    assert Verdict.DUPLICATE is round_.admit(upload("a"))
    assert "ended" == refusal(round_, upload("b"))
    round_.open([Participant("b", 3, 10, 5, 5.0)])
    assert Verdict.TAKE is round_.admit(upload("b"))


def test_unplanned_client() -> None:
    assert "unplanned" == refusal(shard_round(), upload("stranger"))
    assert "unplanned" == refusal(shard_round(max_staleness=1), upload("stranger", 2))


def test_a_late_client_cannot_claim_a_newer_round() -> None:
    """Its update would count more."""
    round_ = shard_round(max_staleness=2, participants=[Participant("a", 1, 10, 5, 5.0)])
    assert ["unplanned"] * 2 == [refusal(round_, upload("a", newer)) for newer in (2, 3)]
    assert Verdict.TAKE is round_.admit(upload("a", 1))


def test_not_open_until_the_plan_is_known() -> None:
    round_ = shard_round(participants=None)
    assert "not_open" == refusal(round_, upload("a"))
    round_.open([Participant("a", 3, 10, 5, 5.0)])
    assert Verdict.TAKE is round_.admit(upload("a"))
    assert "unplanned" == refusal(round_, upload("b"))


def test_sealed_round_opens_again_with_what_it_has() -> None:
    round_ = shard_round(accepted=[upload("a")], sealed=True)
    assert "late" == refusal(round_, upload("b"))
    round_.open([Participant(client, 3, 10, 5, 5.0) for client in ("a", "b")])
    assert Verdict.DUPLICATE is round_.admit(upload("a"))
    assert Verdict.TAKE is round_.admit(upload("b"))
