import numpy as np
import pytest

from fedel.strategies import DepthFL, FedAvg, FedEL, FedNova, FedProx, HeteroFL, build, describe
from fedel.strategies.base import clock_of
from fedel.strategies.depthfl import depths
from fedel.strategies.fedprox import Pull
from fedel.types import LocalWork
from tests.simulation.history import run_rounds
from tests.strategies.fakes import Recorder, context_of, fleet, initial_model, same_bits, spec

PLAIN = LocalWork(num_steps=4, batch_size=8, lr=0.1, momentum=0.0, weight_decay=0.0)


def test_fedprox_without_pull_is_its_base():
    for base in (FedAvg(), FedEL(), HeteroFL()):
        assert same_bits(run_rounds(base, 3).model, run_rounds(FedProx(base, mu=0.0), 3).model)


def test_fedprox_pulls_every_job_of_its_base():
    client = Recorder(**vars(fleet()["client-1"]))
    strategy = FedProx(FedEL(), mu=0.3)
    task = strategy.plan(context_of({"client-1": client})).tasks[0]
    _, memory = strategy.fit(task, initial_model(), run_rounds(FedEL(), 1).memories["client-1"], client)
    assert (Pull(0.3),) == client.asked[0].hooks
    assert memory.window is not None


def test_fedprox_changes_the_model():
    assert not same_bits(run_rounds(FedEL(), 3).model, run_rounds(FedProx(FedEL(), mu=0.1), 3).model)


@pytest.mark.parametrize("base", [FedAvg(), FedEL(), FedEL(weighting="samples"), HeteroFL()])
def test_fednova_with_equal_steps_is_its_base(base):
    mine = run_rounds(FedNova(base), 3, work=PLAIN)
    theirs = run_rounds(base, 3, work=PLAIN)
    for name in theirs.model:
        np.testing.assert_allclose(mine.model[name], theirs.model[name], rtol=1e-5, atol=1e-6)


def test_fednova_is_damped_as_its_base_is():
    base = FedEL(damping=0.5)
    mine, theirs = run_rounds(FedNova(FedProx(base, mu=0.0)), 3, work=PLAIN), run_rounds(base, 3, work=PLAIN)
    for name in theirs.model:
        np.testing.assert_allclose(mine.model[name], theirs.model[name], rtol=1e-5, atol=1e-6)
    assert not same_bits(theirs.model, run_rounds(FedEL(), 3, work=PLAIN).model)


def test_fednova_with_unequal_steps_is_not_its_base():
    epochs = LocalWork(num_steps=0, num_epochs=1, batch_size=8, lr=0.1, momentum=0.0, weight_decay=0.0)
    mine, theirs = run_rounds(FedNova(FedAvg()), 1, work=epochs), run_rounds(FedAvg(), 1, work=epochs)
    steps = {r.client: r.num_steps for r in mine.reports}
    assert len(set(steps.values())) > 1
    # By hand, for one tensor: w - tau_eff * sum p/a (w - w_n).
    name = "blocks.stem.conv.weight"
    old = mine.models[0][name].astype(np.float64)
    updates = mine.updates[0]
    total = sum(u.report.num_samples for u in updates)
    tau = sum(u.report.num_samples / total * u.report.effective_steps for u in updates)
    change = sum(
        u.report.num_samples / total / u.report.effective_steps * (old - u.patches[name].values)
        for u in updates
    )
    np.testing.assert_allclose(mine.model[name], old - tau * change, rtol=1e-5, atol=1e-6)
    assert not np.allclose(mine.model[name], theirs.model[name])


def test_fednova_averages_statistics_plainly():
    base = run_rounds(FedAvg(), 1)
    nova = run_rounds(FedNova(FedAvg()), 1)
    for name in ("blocks.norm.bn.running_mean", "blocks.norm.bn.running_var"):
        assert base.model[name].tobytes() == nova.model[name].tobytes()


def test_wrappers_answer_as_their_base():
    assert (0.5, 0.25) == FedProx(FedNova(HeteroFL(widths=(0.5, 0.25)))).widths
    assert depths(spec()) == FedNova(FedProx(DepthFL())).exits_to_average(spec())
    assert () == FedNova(FedEL()).exits_to_average(spec())


@pytest.mark.parametrize(
    ("strategy", "default", "clock"),
    [
        (FedAvg(), "train", "train"),
        (FedProx(FedNova()), "backward", "backward"),
        (FedEL(), "train", "backward"),
        (FedNova(FedEL(budget_scope="train")), "backward", "train"),
    ],
)
def test_clock(strategy, default, clock):
    assert clock == clock_of(strategy, default)


def test_wrappers_compose():
    strategy = FedProx(FedNova(FedEL(budget_scope="train")), mu=0.1)
    assert "uniform" == strategy.weighting
    assert strategy == build(describe(strategy))
    history = run_rounds(strategy, 4, scope="train")
    assert all(np.isfinite(values).all() for values in history.model.values())


def test_a_negative_pull_is_refused():
    with pytest.raises(ValueError, match="mu = -1"):
        FedProx(mu=-1)
