"""Unequal devices: slower than a base profile by a factor, or with their own profile (section 5.1; A4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedel.config import nearest
from fedel.errors import ConfigError
from fedel.seeds import generator
from fedel.simulation.conditions import Link, Network
from fedel.training.profile_io import load_profile
from fedel.types import ModelSpec, TimingProfile


@dataclass(frozen=True)
class DeviceType:
    """How fast a kind of device is."""

    slowness: float = 1.0
    """Times slower than the base profile, tensor by tensor, or than its own."""
    profile: str = ""
    """File of its own timing profile, as ``fedel profile`` writes it; empty takes the base."""
    memory_mb: int = 0
    """Megabytes of memory that it may use in all; 0 sets no limit. Needs a profile that was measured."""

    def __post_init__(self) -> None:
        if self.memory_mb < 0:
            raise ValueError(f"memory_mb = {self.memory_mb}: 0 is the least, and sets no limit")
        if self.slowness <= 0:
            raise ValueError(f"slowness = {self.slowness:g}: a factor above 0; 2 is half as fast")


KNOWN: Mapping[str, DeviceType] = {
    "orin": DeviceType(1.0),
    "xavier": DeviceType(2.0),  # the paper's testbed: rounds of a Xavier take nearly twice as long
    "orin/2": DeviceType(2.0),
    "orin/3": DeviceType(3.0),
    "orin/4": DeviceType(4.0),
}


@dataclass(frozen=True)
class FleetConfig:
    """Which devices there are."""

    base: str = "auto"
    """The profile of slowness 1: ``orin`` for the published figures (VGG16, ResNet50), ``measured`` once on
    this machine, ``flops`` for seconds in proportion to multiplications, a profile's file, or ``auto``: orin
    where the model and its input fit, else measured."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Devices of each type, assigned in this order; empty draws a type for every client from ``random``."""
    random: tuple[str, ...] = ("orin", "orin/2", "orin/3", "orin/4")
    """Types to draw from with the run's seed, all equally likely."""
    types: Mapping[str, DeviceType] = field(default_factory=dict)
    """Types in addition to the known ones: orin, xavier, orin/2, orin/3, orin/4."""

    def __post_init__(self) -> None:
        known = {**KNOWN, **self.types}
        for name in (*self.counts, *self.random):
            if name not in known:
                raise ValueError(f"unknown device type '{name}'; {nearest(name, known)}")
        if any(count < 0 for count in self.counts.values()) or not (self.counts or self.random):
            raise ValueError("counts are not negative, and without counts 'random' names at least one type")


@dataclass(frozen=True)
class Client:
    """One simulated device and the samples it holds."""

    name: str
    num_samples: int
    profile: TimingProfile
    device: str = ""
    link: Link = field(default_factory=Link)
    num_held_out: int = 0
    """Samples that it tests models on and does not train on."""


def names(num_clients: int) -> list[str]:
    """Names that sort as numbers do.

    >>> names(11)[1], names(11)[10]
    ('client-01', 'client-10')
    """
    digits = len(str(num_clients - 1))
    return [f"client-{i:0{digits}d}" for i in range(num_clients)]


def assign(fleet: FleetConfig, clients: Sequence[str], seed: int) -> list[str]:
    """The device type of each client, the same for the whole run."""
    if fleet.counts:
        return [name for name, count in fleet.counts.items() for _ in range(count)]
    draws = (generator(seed, "device", client).integers(len(fleet.random)) for client in clients)
    return [fleet.random[int(draw)] for draw in draws]


def profiles(fleet: FleetConfig, base: TimingProfile, spec: ModelSpec) -> dict[str, TimingProfile]:
    """The timing profile of every type the fleet uses."""
    used = dict.fromkeys((*fleet.counts,) if fleet.counts else fleet.random)
    found = {}
    for name in used:
        kind = {**KNOWN, **fleet.types}[name]
        own = load_profile(Path(kind.profile), spec) if kind.profile else base
        found[name] = _limited(own, name, kind.memory_mb).scaled(kind.slowness, name)
    return found


def _limited(profile: TimingProfile, name: str, memory_mb: int) -> TimingProfile:
    if not memory_mb:
        return profile
    if profile.memory is None:
        raise ConfigError(
            f"[fleet.types.{name}] memory_mb = {memory_mb}: the timing profile it uses ({profile.device}) says"
            ' nothing about memory; set base = "measured", or give it a profile from `fedel profile`'
        )
    return replace(profile, memory=replace(profile.memory, limit_bytes=memory_mb * 10**6))


def build(
    fleet: FleetConfig, base: TimingProfile, spec: ModelSpec, sizes: Sequence[int], network: Network, seed: int
) -> list[Client]:
    """The clients; ``sizes`` gives the number of samples of each."""
    clients = names(len(sizes))
    kinds, timing = assign(fleet, clients, seed), profiles(fleet, base, spec)
    unknown = sorted(set(network.devices) - set(timing))
    if unknown:
        raise ConfigError(
            f"[network.devices]: the fleet has no device type '{unknown[0]}'; {nearest(unknown[0], timing)}"
        )
    return [
        Client(name, size, timing[kind], kind, network.link(kind))
        for name, size, kind in zip(clients, sizes, kinds, strict=True)
    ]
