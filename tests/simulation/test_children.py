"""A forked process computes and answers; what belongs to its parent it leaves alone."""

from __future__ import annotations

import gc

import pytest

from fedel.simulation.children import Child

DELETED: list[str] = []


class Garbage:
    """Something of the parent's that must end in the parent, as a channel of gRPC."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        DELETED.append("garbage")


@pytest.fixture
def collecting_by_hand():
    gc.disable()
    yield
    gc.enable()


def test_a_child_does_not_collect_what_its_parent_left_over(collecting_by_hand):
    Garbage()

    def collect(_: object) -> tuple[bool, list[str]]:
        enabled = gc.isenabled()
        gc.collect()
        return enabled, DELETED

    child = Child(collect)
    try:
        child.send(None)
        assert (True, []) == child.receive()
    finally:
        child.end()
    assert not gc.isenabled(), "the parent goes on as it was"
    gc.collect()
    assert ["garbage"] == DELETED
