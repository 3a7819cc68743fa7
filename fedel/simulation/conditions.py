"""What happens to devices: the network to the server, drop-outs, and heat that slows them down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedel.seeds import generator
from fedel.types import Speed

_BITS = 8e-6
"""Megabits in a byte."""


@dataclass(frozen=True)
class Link:
    """A device's link to the server. A rate of 0 takes no time: the paper's times leave communication out."""

    up_mbps: float = 0.0
    """Rate at which a device sends, in Mbit/s."""
    down_mbps: float = 0.0
    """Rate at which it receives, in Mbit/s."""
    latency_seconds: float = 0.0
    """Paid once to receive and once to send."""

    def __post_init__(self) -> None:
        if min(self.up_mbps, self.down_mbps, self.latency_seconds) < 0:
            raise ValueError("rates in Mbit/s and seconds of latency are not negative")

    def seconds(self, bytes_up: int, bytes_down: int) -> float:
        """Time on the network in one round.

        >>> Link(up_mbps=8, down_mbps=16, latency_seconds=0.5).seconds(bytes_up=2_000_000, bytes_down=2_000_000)
        4.0
        """
        return self.up_seconds(bytes_up) + self.down_seconds(bytes_down)

    def up_seconds(self, num_bytes: int) -> float:
        return (num_bytes * _BITS / self.up_mbps if self.up_mbps else 0.0) + self.latency_seconds

    def down_seconds(self, num_bytes: int) -> float:
        return (num_bytes * _BITS / self.down_mbps if self.down_mbps else 0.0) + self.latency_seconds

    @property
    def speed(self) -> Speed:
        """What a device would measure of it."""
        return Speed(down_rate=self.down_mbps / _BITS, up_rate=self.up_mbps / _BITS)


@dataclass(frozen=True)
class Network(Link):
    """The link of every device, except those whose type has its own."""

    devices: Mapping[str, Link] = field(default_factory=dict)
    """By device type."""

    def link(self, device: str) -> Link:
        return self.devices.get(device, self)


@dataclass(frozen=True)
class Faults:
    """What goes wrong, drawn from the run's seed."""

    dropout: float = 0.0
    """Probability that a client of a round never reports; the round then waits until its deadline."""
    failure: float = 0.0
    """Probability that a client reports that its task failed; the round then goes on without it."""
    drift_factor: float = 1.0
    """How many times slower a device that heats up is in the end. Its profile does not show it."""
    drift_share: float = 1.0
    """Share of the devices that heat up."""
    drift_start: int = 0
    """Round in which they begin to."""
    drift_rounds: int = 1
    """Rounds until they are as slow as they get."""

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in (self.dropout, self.failure, self.drift_share)):
            raise ValueError("dropout, failure and drift_share lie between 0 and 1")
        if self.drift_factor <= 0 or self.drift_rounds < 1 or self.drift_start < 0:
            raise ValueError("drift_factor is above 0, drift_rounds at least 1, drift_start at least 0")

    def drops_out(self, seed: int, round_num: int, client: str) -> bool:
        return bool(generator(seed, "dropout", round_num, client).random() < self.dropout)

    def fails(self, seed: int, round_num: int, client: str) -> bool:
        return bool(generator(seed, "failure", round_num, client).random() < self.failure)

    def drift(self, seed: int, round_num: int, client: str) -> float:
        """How many times slower than its profile the client is.

        >>> [Faults(drift_factor=3, drift_start=1, drift_rounds=2).drift(0, r, "a") for r in range(5)]
        [1.0, 1.0, 2.0, 3.0, 3.0]
        """
        if self.drift_factor == 1 or generator(seed, "drift", client).random() >= self.drift_share:
            return 1.0
        ramp = min(1.0, max(0, round_num - self.drift_start) / self.drift_rounds)
        return 1.0 + (self.drift_factor - 1.0) * ramp
