"""What holds for all methods on an uneven fleet, and that the fake fleet is not blind."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedel.errors import ConfigError
from fedel.strategies import METHODS, build, describe
from fedel.strategies.depthfl import Distillation, FedDyn
from fedel.strategies.fedprox import Pull
from fedel.strategies.fiarse import LargeWeights
from fedel.strategies.heterofl import OwnClasses, Scaler
from fedel.strategies.inner_exits import Teaching
from fedel.types import Fold, Memory, ModelSpec, Role, Strategy, TrainSpec, Window
from tests.simulation.history import run_rounds

from .fakes import (
    WORK,
    FakeTrainer,
    context_of,
    fleet,
    frozen_spec,
    initial_model,
    profile,
    same_bits,
    spec,
)

VARIANTS: dict[str, dict[str, Any]] = {name: {"name": name} for name in METHODS} | {
    "depthfl+feddyn": {"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": 8},
    "pyramidfl+drop": {"name": "pyramidfl", "drop_low": 0.1, "drop_high": 0.6},
    "fiarse+optimistic": {"name": "fiarse", "clock": "optimistic"},
    "fednova+fedel": {"name": "fednova", "base": {"name": "fedel"}},
    "fedel+teach": {"name": "fedel", "teach": 0.5, "start": "spread"},
    "fedel+within": {"name": "fedel", "window_within": True},
}
BUDGETED = (
    *(
        "elastictrainer",
        "fedel",
        "fedel+teach",
        "fedel+within",
        "heterofl",
        "fiarse+optimistic",
        "fedavg-cut",
        "fedavg-fast",
    ),
)
NUM_FAST = 2
"""Of the eight devices: all that fedavg-fast can take."""


@pytest.fixture(params=VARIANTS, ids=str)
def strategy(request: pytest.FixtureRequest) -> Strategy:
    return build(VARIANTS[request.param])


@pytest.fixture(params=[spec(), frozen_spec()], ids=lambda of: of.name)
def of(request: pytest.FixtureRequest) -> ModelSpec:
    made: ModelSpec = request.param
    return made


def test_five_rounds_repeat_to_the_bit_whatever_the_order_of_updates(strategy: Strategy, of: ModelSpec) -> None:
    first = run_rounds(strategy, 5, fleet(8, of), num_participants=5)
    second = run_rounds(strategy, 5, fleet(8, of), num_participants=5, backwards=True)
    other = run_rounds(strategy, 5, fleet(8, of), num_participants=5, seed=2)
    assert same_bits(first.model, second.model)
    assert not same_bits(first.model, other.model)
    wanted = NUM_FAST if strategy.name == "fedavg-fast" else 5
    assert [len(updates) for updates in first.updates] == [wanted] * 5
    assert all(np.isfinite(values).all() for values in first.model.values())
    assert all(values.dtype == np.float32 for values in first.model.values())


def test_what_nobody_trained_keeps_its_bits(strategy: Strategy, of: ModelSpec) -> None:
    history = run_rounds(strategy, 5, fleet(8, of), num_participants=3)
    for before, updates, after in zip(
        history.models, history.updates, [*history.models[1:], history.model], strict=True
    ):
        sent = {name for update in updates for name in update.patches}
        untouched = [t.name for t in of.tensors if t.name not in sent]
        assert set(untouched) >= {t.name for t in of.tensors if t.role is Role.FROZEN}
        for name in untouched:
            assert after[name].tobytes() == before[name].tobytes(), name
        for update in updates:
            assert {n for n in update.patches if of.by_name[n].role is Role.WEIGHT} <= set(
                update.report.selected
            )


@pytest.mark.parametrize("scope", ["backward", "train"])
@pytest.mark.parametrize("name", BUDGETED)
def test_steps_keep_the_budget_that_they_promise(name: str, scope: str) -> None:
    strategy = build({**VARIANTS[name], "budget_scope": scope})
    history = run_rounds(strategy, 5, fleet(8), scope=scope)
    over = [
        report.client
        for report in history.reports
        if report.batches * report.cost.total(scope) > WORK.num_steps * history.budget_seconds * (1 + 1e-6)
        and not report.over_budget
    ]
    assert over == []
    if scope == "backward":
        assert not any(report.over_budget for report in history.reports)


def test_depthfl_keeps_the_budget_but_for_the_exits_of_the_fastest() -> None:
    history = run_rounds(build({"name": "depthfl"}), 2, fleet(8))
    for report in history.reports:
        assert report.window is not None
        fits = report.cost.total("backward") <= history.budget_seconds * (1 + 1e-9)
        assert fits or report.window.front == spec().num_blocks


def test_plans_keep_their_memory_as_json(strategy: Strategy) -> None:
    clients = fleet(8)
    history = run_rounds(strategy, 3, clients, num_participants=4)
    last = {report.client: report for report in history.reports}
    state = history.plans[-1].state
    kept = json.loads(json.dumps(state, allow_nan=False))
    direct, stored = (
        strategy.plan(context_of(clients, 3, num_participants=4, state=s, last=last)) for s in (state, kept)
    )
    assert direct == stored
    settings = [value for plan in history.plans for task in plan.tasks for value in task.settings.values()]
    assert {type(value) for value in settings} <= {float}


def test_a_described_strategy_is_built_again_the_same(strategy: Strategy) -> None:
    table = json.loads(json.dumps(describe(strategy)))
    assert build(table) == strategy


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "heterofl", "width": [0.5]}, r"unknown key 'width'; did you mean 'widths'\?"),
        ({"name": "heterofl", "widths": [2.0]}, r"\[strategy\]: widths = \[2.0\]"),
        ({"name": "depthfl", "feddyn_alpha": 0.1}, r"\[strategy\]: feddyn_alpha = 0.1 needs num_clients"),
        ({"name": "fedel", "damping": 1.5}, r"\[strategy\]: damping = 1.5: between 0, .* and 1"),
        ({"name": "fiarse", "damping": -0.1}, r"\[strategy\]: damping = -0.1"),
        (
            {"name": "depthfl", "damping": 0.5, "feddyn_alpha": 0.1, "num_clients": 9},
            r"damping = 0.5 does not go with feddyn_alpha",
        ),
        ({"name": "timelyfl", "share": "half"}, "expected float, not str"),
        ({"name": "piramidfl"}, "did you mean 'pyramidfl'"),
    ],
)
def test_a_wrong_table_is_refused_with_its_place_and_a_hint(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(table)


BIAS = "blocks.stem.conv.bias"
SPEC = TrainSpec(WORK, 3, 5, frozenset(t.name for t in spec().weights), (2, 6))
WORK_CHANGES: dict[str, Any] = {
    "batch_size": 9,
    "optimiser": "adamw",
    "lr": 0.2,
    "momentum": 0.6,
    "weight_decay": 0.1,
    "clip_norm": 0.1,
}
CHANGES: dict[str, TrainSpec] = {
    "num_steps": replace(SPEC, num_steps=4),
    "seed": replace(SPEC, seed=6),
    "selected": replace(SPEC, selected=SPEC.selected - {BIAS}),
    "exits": replace(SPEC, exits=(4, 6)),
    "end": replace(SPEC, end=2),
    "width": replace(SPEC, width=0.5),
    "static_norm": replace(SPEC, static_norm=True),
    "pull": replace(SPEC, hooks=(Pull(0.1),)),
    "distillation": replace(SPEC, hooks=(Distillation(0.1),)),
    "scaler": replace(SPEC, hooks=(Scaler(0.5),)),
    "own classes": replace(SPEC, hooks=(OwnClasses((0, 2)),)),
    "other classes": replace(SPEC, hooks=(OwnClasses((1,)),)),
    "large weights": replace(SPEC, hooks=(LargeWeights((BIAS,), 0.5),)),
    "feddyn": replace(SPEC, hooks=(FedDyn(0.1, {}),)),
    "drift": replace(SPEC, hooks=(FedDyn(0.1, {BIAS: np.ones(4, np.float32)}),)),
    "teaching": replace(SPEC, hooks=(Teaching(0.1),)),
    "two hooks": replace(SPEC, hooks=(Distillation(0.1), Pull(0.1))),
} | {f"work.{name}": replace(SPEC, work=replace(WORK, **{name: value})) for name, value in WORK_CHANGES.items()}


def test_the_fake_trainer_answers_to_every_field_and_hook() -> None:
    client, model = FakeTrainer(1, 20, profile(), (0, 2)), initial_model()
    seen = {"plain": _fingerprint(client, model, SPEC)}
    for name, train_spec in CHANGES.items():
        seen[name] = _fingerprint(client, model, train_spec)
    seen["data_seed"] = _fingerprint(replace(client, data_seed=2), model, SPEC)
    seen["num_samples"] = _fingerprint(replace(client, num_samples=21), model, SPEC)
    same = [(a, b) for a in seen for b in seen if a < b and seen[a] == seen[b]]
    assert same == []
    assert _fingerprint(client, model, SPEC) == seen["plain"]


def test_the_fake_probe_leaves_the_model_alone() -> None:
    client, model = FakeTrainer(1, 20, profile()), initial_model()
    change = client.probe(model, Window(2, 4), WORK, seed=3)
    assert set(change) == {t.name for t in spec().weights_in(2, 4)}
    assert (
        change == client.probe(model, Window(2, 4), WORK, seed=3) != client.probe(model, Window(2, 4), WORK, 4)
    )
    assert same_bits(model, initial_model())


def test_a_round_does_not_depend_on_rounds_before_it_but_through_its_arguments(strategy: Strategy) -> None:
    clients, model = fleet(), initial_model()
    task = strategy.plan(context_of(clients)).tasks[1]
    once, _ = strategy.fit(task, model, Memory(), clients[task.client])
    again, _ = strategy.fit(task, model, Memory(), clients[task.client])
    assert once.report == again.report
    assert same_bits(
        {n: p.values for n, p in once.patches.items()}, {n: p.values for n, p in again.patches.items()}
    )
    assert same_bits(model, initial_model())


def _fingerprint(client: FakeTrainer, model: dict[str, Any], train_spec: TrainSpec) -> tuple[bytes, ...]:
    trained = client.train(model, train_spec)
    return tuple(name.encode() + patch.values.tobytes() for name, patch in trained.patches.items())


def test_a_fold_finishes_tensor_by_tensor_as_it_does_at_once(strategy: Strategy) -> None:
    clients, model = fleet(), initial_model()
    tasks = strategy.plan(context_of(clients)).tasks
    updates = [strategy.fit(task, model, Memory(), clients[task.client])[0] for task in tasks]

    def fold() -> Fold:
        made = strategy.fold(spec())
        for update in updates:
            made.add(update)
        return made

    at_once = fold().finish(model, {})
    in_parts, parts, state = fold(), {}, {}
    for name, values in model.items():
        part = in_parts.finish({name: values}, state)
        parts[name], state = part.model[name], part.state
    assert same_bits(at_once.model, parts)
    assert same_bits(at_once.state, state)
