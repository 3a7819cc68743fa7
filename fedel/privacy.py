"""What the noise of ``[protection]`` is worth: epsilon, by Google's dp-accounting (docs/privacy.md)."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

from fedel.errors import ConfigError
from fedel.job import Protection

_STEP = 1e-4
"""Of the accountant's grid, as a share of epsilon. It rounds up, so that epsilon is never too small; a finer
grid takes longer."""


def check_installed(protection: Protection) -> None:
    """Refuse a run with noise where nobody could say what it is worth."""
    if protection.noise_multiplier and not _is_installed():
        raise ConfigError(
            "[protection] noise_multiplier: the package 'dp-accounting', which computes epsilon, is not"
            " installed; run: pip install 'fedel[privacy]'"
        )


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("dp_accounting") is not None
    except ValueError:  # it is blocked
        return False


def epsilon(protection: Protection, num_rounds: int) -> float | None:
    """For a client that took part in so many rounds; ``None`` without noise.

    Every round is counted in full. That clients are drawn at random would lower epsilon only if nobody knew the
    draw, but the run's seed, which decides it, is known to all its clients.
    """
    if not protection.noise_multiplier:
        return None
    return _epsilon(protection.noise_multiplier, num_rounds, protection.delta)


@lru_cache
def _epsilon(noise_multiplier: float, num_rounds: int, delta: float) -> float:
    # Takes seconds to import, and most runs have no noise.
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    rounds = GaussianDpEvent(noise_multiplier), num_rounds
    about = RdpAccountant().compose(*rounds).get_epsilon(delta)
    exact = PLDAccountant(value_discretization_interval=max(_STEP, _STEP * about)).compose(*rounds)
    return float(exact.get_epsilon(delta))
