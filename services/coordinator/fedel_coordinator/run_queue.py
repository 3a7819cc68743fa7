"""Starts queued runs when their turn comes, and says what the others wait for. Used on the event loop alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedel.roles import events as ev
from fedel.roles.run_queue import Place, behind, to_start
from fedel.roles.run_state import QUEUED, WAITING
from fedel_coordinator.run import CoordinatorRun


class RunQueue:
    """The runs of one coordinator; ``fedel.roles.run_queue`` decides."""

    def __init__(self, runs: Mapping[str, CoordinatorRun], max_active: int) -> None:
        """``max_active`` of 0 is no limit."""
        self._runs, self._max_active = runs, max_active
        self._starting: set[str] = set()
        """Their turn has come, and they are about to learn it."""

    def first_phase(self, place: Place) -> str:
        """Of a run that is new: whether it waits for its turn."""
        new = Place(place.run, QUEUED, place.priority, place.created_at)
        return WAITING if place.run in to_start([*self._places(), new], self._max_active) else QUEUED

    def settle(self) -> None:
        """Look again: a run was made, or its phase changed."""
        self._starting &= {name for name, run in self._runs.items() if run.state.phase == QUEUED}
        for name in to_start(self._places(), self._max_active):
            self._starting.add(name)
            self._runs[name].post(ev.Admitted())
        reasons = behind(self._places(), self._max_active)
        for name, run in self._runs.items():
            run.show("queue", reasons.get(name, ""))

    def _places(self) -> Iterable[Place]:
        for name, run in self._runs.items():
            phase = WAITING if name in self._starting else run.state.phase
            yield Place(name, phase, run.config.priority, run.row.created_at)
