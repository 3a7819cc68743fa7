"""FedEL within a limit of memory: windows, probes and selections fit it, and every block still has its turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from fedel.core.memory_budget import least_bytes, probe_bytes, step_bytes, whole_bytes
from fedel.strategies import ElasticTrainer, FedEL
from fedel.strategies.base import task_for
from fedel.testing import memory_use
from fedel.types import ClientView, LocalWork, Memory, ModelSpec, Strategy, Task, Tensors, Window

from .fakes import Recorder, context_of, fleet, frozen_spec, initial_model, spec

SPEC = spec()


@dataclass(frozen=True)
class Limited(Recorder):
    """Keeps the windows that it was asked to probe, too."""

    probed: list[Window] = field(default_factory=list)

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        self.probed.append(window)
        return super().probe(model, window, work, seed)


def client_of(limit_bytes: int, of: ModelSpec = SPEC) -> Limited:
    fast = fleet(of=of)["client-0"]
    profile = replace(fast.profile, memory=memory_use(of, limit_bytes))
    return Limited(fast.data_seed, fast.num_samples, profile, fast.classes, of)


def rounds(client: Limited, method: Strategy, num_rounds: int = 8, budget_seconds: float = 0.1) -> list[Memory]:
    """The memory after each round, with the limit of the client's profile."""
    memory, memories, model = Memory(), [], initial_model(client.spec)
    for number in range(num_rounds):
        context = context_of({"a": client}, number, budget_seconds=budget_seconds)
        task = task_for(context, context.clients[0])
        assert task.memory_bytes == client.profile.memory_limit_bytes
        _, memory = method.fit(task, model, memory, client)
        memories.append(memory)
    return memories


@pytest.mark.parametrize("variant", ["fedel", "disjoint", "no-rollback"])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.9])
@pytest.mark.parametrize("of", [SPEC, frozen_spec()], ids=["trained", "frozen"])
def test_never_over(share: float, variant: str, of: ModelSpec) -> None:
    use = memory_use(of)
    least = max(
        least_bytes(of, use), min(probe_bytes(of, use, Window(b, b)) for b in range(1, of.num_blocks + 1))
    )
    limit = int(least + share * (whole_bytes(of, use) - least))
    client = client_of(limit, of)
    rounds(client, FedEL(variant=variant, hold_rounds=2))
    assert client.asked
    for job in client.asked:
        assert step_bytes(of, use, job.selected, Window(job.end, max(job.exits))) <= limit
    for window in client.probed:
        assert probe_bytes(of, use, window) <= limit


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_elastictrainer_trains_what_fits_on_the_output_side(share: float) -> None:
    use, last = memory_use(SPEC), SPEC.num_blocks
    least = probe_bytes(SPEC, use, Window(last, last))
    limit = int(least + share * (probe_bytes(SPEC, use, Window(1, last)) - least))
    client = client_of(limit)
    rounds(client, ElasticTrainer(), num_rounds=3, budget_seconds=10.0)
    for job in client.asked:
        assert step_bytes(SPEC, use, job.selected, Window(job.end, last)) <= limit
    (window,) = set(client.probed)
    assert probe_bytes(SPEC, use, window) <= limit < probe_bytes(SPEC, use, Window(window.end - 1, last))


def test_elastictrainer_goes_on_where_no_probe_fits() -> None:
    last = SPEC.num_blocks
    client = client_of(probe_bytes(SPEC, memory_use(SPEC), Window(last, last)) - 1)
    rounds(client, ElasticTrainer(), num_rounds=2)
    assert [] == client.probed
    assert {(last, last)} == {(job.end, max(job.exits)) for job in client.asked}


def test_every_block_that_fits_has_its_turn() -> None:
    use = memory_use(SPEC)
    limit = probe_bytes(SPEC, use, Window(2, 2))
    client = client_of(limit)
    rounds(client, FedEL(), num_rounds=12, budget_seconds=10.0)
    fronts = {max(job.exits) for job in client.asked}
    fitting = {b for b in range(1, 7) if probe_bytes(SPEC, use, Window(b, b)) <= limit}
    assert 1 not in fitting
    assert fitting == fronts


def test_without_a_limit_nothing_changes() -> None:
    unlimited, unmeasured = client_of(0), fleet()["client-0"]
    plain = Limited(unmeasured.data_seed, unmeasured.num_samples, unmeasured.profile, unmeasured.classes, SPEC)
    assert rounds(unlimited, FedEL()) == rounds(plain, FedEL())


def test_where_no_probe_fits_what_fits_of_the_front_is_trained() -> None:
    use = memory_use(SPEC)
    limit = min(probe_bytes(SPEC, use, Window(b, b)) for b in range(1, 7)) - 1
    client = client_of(limit)
    (memory,) = rounds(client, FedEL(), num_rounds=1, budget_seconds=10.0)
    assert not client.probed
    (job,) = client.asked
    assert memory.window == Window(max(job.exits), max(job.exits))
    assert memory.window.end == job.end
    assert not job.selected or step_bytes(SPEC, use, job.selected, memory.window) <= limit


@dataclass(frozen=True)
class SameInputs(Limited):
    same_inputs: bool = True


@pytest.mark.parametrize("limited", [False, True])
def test_what_memory_is_left_keeps_outputs_of_frozen_blocks(limited: bool) -> None:
    use, work = memory_use(SPEC), LocalWork(num_steps=20, batch_size=5)
    limit = probe_bytes(SPEC, use, Window(2, 4)) + 1000 if limited else 0
    fast = fleet()["client-0"]
    profile = replace(fast.profile, memory=replace(use, limit_bytes=limit))
    client = SameInputs(fast.data_seed, 10, profile, fast.classes, SPEC)
    memory = Memory(Window(1, 3), tuple(t.name for t in SPEC.weights_in(2, 3)))
    task = Task(1, "a", 0.02, work, 3, memory_bytes=limit)
    method = FedEL(prefix_cache_mb=1, train_all_that_fits=True)
    plain, _ = FedEL().fit(task, initial_model(), memory, client)
    update, _ = method.fit(task, initial_model(), memory, client)
    _, job = client.asked
    assert job.end > 1
    window = Window(job.end, max(job.exits))
    # The batch that is computed ahead takes 250 besides.
    left = limit - step_bytes(SPEC, use, job.selected, window) - 250
    assert job.prefix_cache_bytes == (left if limited else 10**6) > 0
    assert update.report.cost.forward_seconds < plain.report.cost.forward_seconds
    assert update.report.cost.backward_seconds == plain.report.cost.backward_seconds


def test_augmented_data_is_not_kept() -> None:
    client = client_of(0)
    rounds(client, FedEL(prefix_cache_mb=1))
    assert {0} == {job.prefix_cache_bytes for job in client.asked}


def test_a_task_names_the_limit_of_its_client() -> None:
    client = client_of(12345)
    context = context_of({"a": client})
    view = ClientView("a", 3, client.profile)
    assert 12345 == task_for(context, view).memory_bytes
