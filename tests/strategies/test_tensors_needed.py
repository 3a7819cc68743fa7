"""Which tensors of the model a task needs, and that nothing else reaches its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from examples.own_method import ServerMomentum
from fedel.errors import ModelError
from fedel.simulation import workers
from fedel.strategies import METHODS, DepthFL, ElasticTrainer, FedAvg, FedEL, FedNova, FedProx, TimelyFL
from fedel.strategies.base import needed_by
from fedel.types import Memory, ModelSpec, Role, Strategy, Task, TensorSpec, Window
from tests.simulation.history import run_rounds
from tests.strategies.fakes import WORK, fleet, frozen_spec, initial_model, same_bits, spec

SPEC, FROZEN = spec(), frozen_spec()
TASK = Task(0, "client-0", 0.05, WORK, seed=1, settings={"depth": 4.0})
EVERYTHING = frozenset(SPEC.by_name)


def needed(strategy: Strategy, memory: Memory | None = None, of: ModelSpec = SPEC) -> frozenset[str]:
    return needed_by(strategy, TASK, memory or Memory(), fleet(1, of)["client-0"])


def held(window: Window) -> tuple[Strategy, Memory]:
    """FedEL with this window in its next round."""
    return FedEL(variant="no-rollback"), Memory(window)


@pytest.mark.parametrize(("end", "front"), [(1, 1), (1, 3), (3, 4), (2, 6), (6, 6)])
def test_fedel_needs_blocks_up_to_the_front_and_its_exit(end: int, front: int) -> None:
    expected = {t.name for t in SPEC.tensors if t.block <= front and t.name.startswith("blocks.")}
    expected |= {t.name for t in SPEC.tensors if t.block == front and t.name.startswith("exits.")}
    assert expected == needed(*held(Window(end, front)))


def test_fedel_on_a_frozen_trunk_needs_the_heads_of_its_window() -> None:
    names = needed(*held(Window(2, 3)), of=FROZEN)
    assert {1, 2, 3} == {FROZEN.by_name[n].block for n in names if FROZEN.by_name[n].role is Role.FROZEN}
    assert {2, 3} == {FROZEN.by_name[n].block for n in names if FROZEN.by_name[n].role is Role.WEIGHT}


def test_fedel_needs_what_its_next_window_runs() -> None:
    trainer, memory, seen = fleet(1)["client-0"], Memory(), set()
    for round_num in range(6):
        task = replace(TASK, round_num=round_num)
        names = needed_by(FedEL(), task, memory, trainer)
        part = {name: values for name, values in initial_model().items() if name in names}
        update, memory = FedEL().fit(task, part, memory, trainer)
        assert update.report.window is not None
        front = update.report.window.front
        assert front == max(SPEC.by_name[name].block for name in names)
        seen.add(front)
    assert len(seen) > 2


def test_depthfl_needs_its_prefix_and_the_exits_in_it() -> None:
    names = needed(DepthFL())
    assert {t.name for t in SPEC.tensors if t.block <= 4 and t.name.startswith("blocks.")} < names
    assert {2, 4} == {SPEC.by_name[name].block for name in names if name.startswith("exits.")}


@pytest.mark.parametrize("strategy", [ElasticTrainer(), TimelyFL()], ids=lambda s: s.name)
def test_whole_models_need_no_early_exit(strategy: Strategy) -> None:
    assert {t.name for t in SPEC.tensors if t.role is not Role.EXIT} == needed(strategy)
    assert FROZEN.by_name.keys() == needed(strategy, of=FROZEN)


def test_statistics_of_an_unused_exit_are_not_needed() -> None:
    mean = TensorSpec("exits.stem.bn.running_mean", 1, (4,), Role.BUFFER)
    with_norm = replace(SPEC, tensors=(*SPEC.tensors, mean))
    assert mean.name in with_norm.tensors_for((1,))
    assert mean.name not in with_norm.tensors_for((3,))


def test_what_is_frozen_in_an_exit_may_be_shared_by_later_ones() -> None:
    shared = TensorSpec("exits.stem.words", 1, (4,), Role.FROZEN)
    with_shared = replace(SPEC, tensors=(*SPEC.tensors, shared))
    assert shared.name in with_shared.tensors_for((3,))


@pytest.mark.parametrize("wrapper", [FedProx, FedNova])
def test_a_method_around_another_needs_the_same(wrapper: type[Any]) -> None:
    assert needed(FedEL()) == needed(wrapper(FedEL())) == needed(FedNova(wrapper(FedEL())))
    assert needed(FedEL()) < EVERYTHING == needed(wrapper(FedAvg()))


# Methods of your own


@dataclass(frozen=True)
class OwnFit(FedEL):
    """Looks at the whole model, which FedEL does not."""

    def fit(self, task: Any, model: Any, memory: Any, trainer: Any) -> Any:
        return super().fit(task, {name: model[name] for name in trainer.spec.by_name}, memory, trainer)


@dataclass(frozen=True)
class OwnSlide(FedEL):
    def slide(self, task: Any, memory: Any, trainer: Any) -> Memory:
        return Memory(Window(1, 2))


@dataclass(frozen=True)
class Bare:
    """As the methods were before they could say what they need."""

    name: ClassVar[str] = "bare"

    def fit(self, task: Any, model: Any, memory: Any, trainer: Any) -> Any: ...


@dataclass(frozen=True)
class OwnAnswer(OwnFit):
    def tensors_needed(self, task: Any, memory: Any, trainer: Any) -> tuple[str, ...]:
        return (SPEC.tensors[0].name,)


@pytest.mark.parametrize("strategy", [OwnFit(), Bare(), ServerMomentum()], ids=lambda s: type(s).__name__)
def test_a_fit_of_your_own_gets_everything_unless_it_says(strategy: Any) -> None:
    assert EVERYTHING == needed(strategy) == needed(FedProx(strategy)) == needed(FedNova(strategy))


def test_what_a_method_of_your_own_says_counts() -> None:
    assert {SPEC.tensors[0].name} == needed(OwnAnswer()) == needed(FedNova(OwnAnswer()))
    assert SPEC.tensors_for((2,)) == needed(OwnSlide())


def test_a_tensor_that_was_not_named_is_missed_by_its_name() -> None:
    @dataclass(frozen=True)
    class TooFew(FedEL):
        def tensors_needed(self, task: Any, memory: Any, trainer: Any) -> set[str]:
            return set(super().tensors_needed(task, memory, trainer) or ()) - {SPEC.tensors[0].name}

    with pytest.raises(ModelError, match=rf"'{SPEC.tensors[0].name}' is missing .* tensors_needed"):
        run_rounds(TooFew(), 1)


@pytest.mark.parametrize("of", [SPEC, FROZEN], ids=lambda s: s.name)
@pytest.mark.parametrize("name", METHODS)
def test_the_same_bits_as_with_the_whole_model(
    name: str, of: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = run_rounds(METHODS[name](), 6, fleet(6, of))
    monkeypatch.setattr(workers, "needed_by", lambda *_: frozenset(of.by_name))
    whole = run_rounds(METHODS[name](), 6, fleet(6, of))
    assert same_bits(part.model, whole.model)
    assert [r.loss for r in part.records] == [r.loss for r in whole.records]
