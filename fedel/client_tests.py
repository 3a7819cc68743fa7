"""The model of a round, tested on data that clients hold and do not train on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OwnScore:
    """The test of a model on data that one client holds and does not train on."""

    client: str
    device_type: str
    accuracy: float
    loss: float
    num_samples: int


@dataclass(frozen=True)
class Spread:
    """What such tests of several clients come to."""

    num_clients: int
    num_samples: int
    mean_accuracy: float
    """Every client counts the same."""
    weighted_accuracy: float
    """Every sample counts the same."""
    worst_accuracy: float
    worst_client: str
    deviation: float
    """Standard deviation of the accuracy over clients."""
    mean_loss: float
    weighted_loss: float


@dataclass(frozen=True)
class ClientTests:
    """The model of a round on the clients' own data."""

    overall: Spread
    by_device_type: Mapping[str, Spread]
    clients: tuple[OwnScore, ...]
    """By name."""
    num_missing: int = 0
    """Clients that were asked and did not answer in time, or could not."""


def client_tests(scores: Sequence[OwnScore], num_missing: int = 0) -> ClientTests | None:
    """What clients' tests of one model come to; ``None`` without any."""
    ordered = sorted(scores, key=lambda score: score.client)
    types = sorted({score.device_type for score in ordered})
    if not ordered:
        return None
    by_type = {kind: _spread([score for score in ordered if score.device_type == kind]) for kind in types}
    return ClientTests(_spread(ordered), by_type, tuple(ordered), num_missing)


def _spread(scores: Sequence[OwnScore]) -> Spread:
    """
    >>> one, two = OwnScore("a", "", 0.5, 2.0, 30), OwnScore("b", "", 1.0, 1.0, 10)
    >>> found = _spread([one, two])
    >>> found.mean_accuracy, found.weighted_accuracy, found.worst_client, found.deviation, found.weighted_loss
    (0.75, 0.625, 'a', 0.25, 1.75)
    """
    number, samples = len(scores), sum(score.num_samples for score in scores)
    mean = math.fsum(score.accuracy for score in scores) / number
    worst = min(scores, key=lambda score: score.accuracy)
    return Spread(
        num_clients=number,
        num_samples=samples,
        mean_accuracy=mean,
        weighted_accuracy=math.fsum(s.accuracy * s.num_samples for s in scores) / samples,
        worst_accuracy=worst.accuracy,
        worst_client=worst.client,
        deviation=math.sqrt(math.fsum((s.accuracy - mean) ** 2 for s in scores) / number),
        mean_loss=math.fsum(s.loss for s in scores) / number,
        weighted_loss=math.fsum(s.loss * s.num_samples for s in scores) / samples,
    )
