"""Epsilon, and where it is written."""

import math
import sys
from pathlib import Path

import pytest

from fedel import privacy
from fedel.errors import ConfigError
from fedel.job import Protection, RunConfig
from fedel.records import run_result
from fedel.report.figures import table
from fedel.report.runs import StoredRun
from tests.simulation.history import play_run
from tests.strategies.fakes import WORK, fleet, frozen_spec

PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 2.0, "num_expected": 5, "delta": 1e-6}


def delta_of(epsilon, noise_multiplier, num_rounds):
    """Of the Gaussian mechanism, exactly (Balle and Wang, 2018)."""
    sensitivity = math.sqrt(num_rounds) / noise_multiplier

    def below(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    half, rest = sensitivity / 2, epsilon / sensitivity
    return below(half - rest) - math.exp(epsilon) * below(-half - rest)


@pytest.mark.parametrize(("noise_multiplier", "num_rounds"), [(1.0, 1), (2.0, 20), (8.0, 100)])
def test_epsilon_is_that_of_the_gaussian_mechanism(noise_multiplier, num_rounds):
    protection = Protection(clip_norm=3.0, noise_multiplier=noise_multiplier, num_expected=9)
    epsilon = privacy.epsilon(protection, num_rounds)
    assert delta_of(epsilon, noise_multiplier, num_rounds) == pytest.approx(1e-5, rel=1e-3)
    assert delta_of(epsilon, noise_multiplier, num_rounds) <= 1e-5


def test_without_noise_there_is_no_epsilon():
    assert privacy.epsilon(Protection(clip_norm=1.0), 5) is None


def test_every_round_says_what_was_spent():
    of = frozen_spec()
    run = RunConfig.parse({"rounds": {"num_rounds": 3}, "work": vars(WORK), "protection": PRIVATE})
    history = play_run(run, fleet(4, of))
    expected = [privacy.epsilon(run.protection, rounds) for rounds in (1, 2, 3)]
    assert expected == [record.epsilon for record in history.records]
    facts = {"name": "r", "phase": "finished", "strategy": "fedel", "seed": 0, "scope": "train", "weights": []}
    result = run_result(**facts, records=history.records, wall_seconds=1.0)
    assert result.epsilon == expected[-1]
    shown = table([StoredRun(Path("r"), {}, None, list(history.records))])
    assert f"{expected[-1]:.2f}" == shown.rows[0][shown.heads.index("epsilon")]


def test_noise_needs_the_accountant(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match="fedel\\[privacy\\]"):
        privacy.check_installed(Protection(**PRIVATE))
