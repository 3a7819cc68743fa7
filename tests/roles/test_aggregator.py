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
    ("takes_late", "sealed", "round_num", "reason"),
    [
        (False, False, 4, "early"),
        (False, False, 2, "late"),
        (False, True, 3, "late"),
        (True, False, 4, "early"),
        (True, False, 1, "late"),
        (True, True, 2, "sealed"),
        (True, True, 3, "sealed"),
    ],
)
def test_round_of_an_upload(takes_late: bool, sealed: bool, round_num: int, reason: str) -> None:
    round_ = shard_round(takes_late=takes_late, sealed=sealed)
    assert reason == refusal(round_, upload("a", round_num))


def test_late_upload_counts_once() -> None:
    before = {"a": Content(2, "d1")}
    round_ = shard_round(takes_late=True, counted_before=before)
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
    for number, reason in ((1, "late"), (4, "early")):
        with pytest.raises(UpdateRefused) as caught:
            round_.is_answered(number)
        assert reason == caught.value.reason


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
    takes_late=st.booleans(),
)
def test_every_update_counts_at_most_once(steps: list[str | Upload], takes_late: bool) -> None:
    """Whatever comes in whatever order, no client counts twice with one round's work."""
    everyone = [Participant(client, number, 10, 5, 5.0) for client in "ab" for number in range(41)]
    options: dict[str, Any] = {"takes_late": takes_late, "participants": everyone}
    round_, counted = ShardRound("night", 0, **options), []
    for step in steps:
        if step == "seal":
            round_.seal()
        elif step == "commit" and round_.clients:
            made = round_.close_with(round_.clients)
            round_ = ShardRound("night", round_.number + 1, counted_before=made, **options)
        elif isinstance(step, Upload):
            try:
                verdict = round_.admit(step)
            except UpdateRefused:
                continue
            if verdict is Verdict.TAKE:
                assert not round_.sealed
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
    assert "unplanned" == refusal(shard_round(takes_late=True), upload("stranger", 2))


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
