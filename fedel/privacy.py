"""What the noise of ``[protection]`` is worth: epsilon, by Google's dp-accounting (docs/privacy.md)."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

from fedel.errors import ConfigError
from fedel.job import Protection

_STEP = 1e-3
"""Of the accountant's grid; it rounds up, so that epsilon is never too small. The default, 1e-4, takes 10 times
as long for a difference in the seventh digit."""


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

    accountant = PLDAccountant(value_discretization_interval=_STEP)
    accountant.compose(GaussianDpEvent(noise_multiplier), num_rounds)
    return float(accountant.get_epsilon(delta))
