import multiprocessing
from functools import partial

import pytest

from fedel.errors import DataError, ServiceError
from fedel.simulation.executors import Processes, SharedModel
from tests.simulation.fakes import play, run_config
from tests.strategies.fakes import fleet, initial_model, same_bits, spec

STRATEGIES = (
    "fedavg",
    "fedel",
    "elastictrainer",
    "heterofl",
    "depthfl",
    "pyramidfl",
    "timelyfl",
    "fiarse",
    {"name": "fednova", "base": {"name": "fedel"}},
    {"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": 9},
)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_any_number_of_processes_gives_the_same_bits(strategy):
    run = run_config(strategy, num_rounds=3, num_participants=5)
    alone = play(run, fleet(9))
    for num_workers in (2, 3):
        together = play(run, fleet(9), partial(Processes, num_workers=num_workers))
        assert same_bits(alone.model, together.model)
        assert alone.comparable() == together.comparable()


def test_another_seed_gives_another_run():
    one, other = (play(run_config("fedel", seed=seed, num_participants=3), fleet(6)) for seed in (1, 2))
    assert not same_bits(one.model, other.model)


def test_a_defect_in_a_worker_shows_its_traceback():
    with pytest.raises(ServiceError, match="planted") as error:
        play(run_config(), fleet(4), partial(Processes, num_workers=2), fails={"client-2": "error"})
    assert "ZeroDivisionError" in str(error.value)


def test_an_error_for_the_user_keeps_its_type():
    with pytest.raises(DataError, match="planted: no samples"):
        play(run_config(), fleet(4), partial(Processes, num_workers=2), fails={"client-1": "user error"})


def test_a_worker_that_dies_is_an_error():
    with pytest.raises(ServiceError, match="exit code 3"):
        play(run_config(), fleet(4), partial(Processes, num_workers=2), fails={"client-1": "dies"})


def test_workers_end_with_their_executor():
    before = multiprocessing.active_children()
    play(run_config(num_rounds=1), fleet(4), partial(Processes, num_workers=3))
    assert before == multiprocessing.active_children()


def test_a_shared_model_holds_what_was_written_and_is_read_only():
    board, model = SharedModel(spec()), initial_model()
    board.write(model)
    changed = {name: -values for name, values in list(model.items())[:2]}
    board.write(changed)
    assert same_bits({**model, **changed}, board.tensors)
    with pytest.raises(ValueError, match="read-only"):
        next(iter(board.tensors.values()))[...] = 0
