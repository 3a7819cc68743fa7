from __future__ import annotations

import pytest
from fedel_edge.progress import WatchedTrainer

from fedel.strategies import FedEL
from fedel.types import LocalWork, Memory, Task, TrainSpec, Window
from tests.strategies.fakes import WORK, FakeTrainer, initial_model, profile, spec

TRAINER = FakeTrainer(1, 20, profile())
JOB = TrainSpec(WORK, 4, 1, frozenset({spec().weights[0].name}), (1,))


class GivenUp(Exception):
    pass


def give_up() -> None:
    raise GivenUp


def test_reports_what_is_trained() -> None:
    seen: list[tuple[Window, tuple[str, ...]]] = []
    trainer = WatchedTrainer(TRAINER, lambda: None, lambda *facts: seen.append(facts))
    update, _ = FedEL().fit(Task(0, "c", 0.1, WORK, 1), initial_model(), Memory(), trainer)
    assert [(update.report.window, update.report.selected)] == seen


def test_begins_nothing_once_given_up() -> None:
    trainer = WatchedTrainer(TRAINER, give_up, lambda *_: pytest.fail("reported"))
    with pytest.raises(GivenUp):
        trainer.probe(initial_model(), Window(1, 2), LocalWork(), 1)
    with pytest.raises(GivenUp):
        trainer.train(initial_model(), JOB)


def test_result_is_lost_once_given_up() -> None:
    checks = iter([None, GivenUp])

    def check() -> None:
        if (error := next(checks)) is not None:
            raise error

    trainer = WatchedTrainer(TRAINER, check, lambda *_: None)
    with pytest.raises(GivenUp):
        trainer.train(initial_model(), JOB)
