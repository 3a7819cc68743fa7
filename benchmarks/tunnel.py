"""A slow, long, lossy link between two network namespaces, packet by packet, for kernels without netem.

Two TUN devices with this process between them: a packet that enters one leaves the other after it has waited
for the bandwidth and the delay, unless it is lost. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import struct
import subprocess
from dataclasses import dataclass, field

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 1500
_QUEUE_SECONDS = 0.2
"""A packet that would have to wait longer for the bandwidth is dropped, as in a router."""


@dataclass(frozen=True)
class Shape:
    mbit: float = 20.0
    delay_seconds: float = 0.08
    """One way."""
    loss: float = 0.02
    """Share of lost packets, each way."""


@dataclass
class Way:
    """One direction of a link."""

    shape: Shape
    out: int
    """File descriptor of the device where packets come out."""
    seed: int
    is_down: bool = False
    num_packets: int = 0
    num_bytes: int = 0
    num_lost: int = 0
    _free_at: float = 0.0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def take(self, packet: bytes, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        begin = max(now, self._free_at)
        self.num_packets += 1
        self.num_bytes += len(packet)
        if self.is_down or begin - now > _QUEUE_SECONDS:
            self.num_lost += 1
            return
        self._free_at = begin + len(packet) * 8 / (self.shape.mbit * 1e6)
        if self._random.random() < self.shape.loss:
            self.num_lost += 1
            return
        loop.call_at(self._free_at + self.shape.delay_seconds, self._deliver, packet)

    def _deliver(self, packet: bytes) -> None:
        if self.is_down:
            self.num_lost += 1
        else:
            os.write(self.out, packet)


class Link:
    """A link between this namespace, with the address ``near``, and another one."""

    def __init__(
        self,
        name: str,
        namespace: str,
        near: str,
        far: str,
        shape: Shape,
        seed: int,
        down: Shape | None = None,
    ) -> None:
        """``near`` and ``far`` are addresses; all traffic of ``namespace`` goes over this link.

        ``shape`` is that of both ways, unless ``down``, from here to ``namespace``, has its own.
        """
        here, there = _open(f"{name}-h"), _open(f"{name}-t")
        self._ends = (here, there)
        self.up = Way(shape, here, 2 * seed)
        self.down = Way(down or shape, there, 2 * seed + 1)
        ip("link", "set", f"{name}-t", "netns", namespace)
        ip("addr", "add", near, "peer", far, "dev", f"{name}-h")
        ip("link", "set", f"{name}-h", "up", "mtu", str(_MTU))
        ip("-n", namespace, "addr", "add", far, "peer", near, "dev", f"{name}-t")
        ip("-n", namespace, "link", "set", f"{name}-t", "up", "mtu", str(_MTU))
        ip("-n", namespace, "route", "add", "default", "dev", f"{name}-t")
        loop = asyncio.get_running_loop()
        loop.add_reader(there, self._read, there, self.up, loop)
        loop.add_reader(here, self._read, here, self.down, loop)

    def cut(self, cut: bool) -> None:
        self.up.is_down = self.down.is_down = cut

    def close(self) -> None:
        for end in self._ends:
            asyncio.get_running_loop().remove_reader(end)
            os.close(end)

    @staticmethod
    def _read(end: int, way: Way, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                way.take(os.read(end, _MTU + 100), loop)
        except BlockingIOError:
            return


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _open(name: str) -> int:
    """A new TUN device; it disappears when its descriptor is closed."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device
