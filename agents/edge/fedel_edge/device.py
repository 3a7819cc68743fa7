"""What a device is and how it does: type, memory, power, temperature. What it does not report is ``None``.

Everything is read from files that Linux provides; ``root`` is where they start, so that tests can use others.
"""

from __future__ import annotations

import platform
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

SAMPLE_SECONDS = 0.5
_PLAUSIBLE_CELSIUS = (-40.0, 150.0)
"""A zone that is switched off reports nonsense outside this range."""


@dataclass(frozen=True)
class Facts:
    """Type and memory of a device."""

    device_type: str
    memory_bytes: int


def facts(root: Path = Path("/")) -> Facts:
    model = _text(root / "proc/device-tree/model").strip("\0 ")
    name = re.sub(r"[^a-z0-9]+", "-", model.lower().removeprefix("nvidia ")).strip("-")
    total = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return Facts(
        name or f"{platform.system()}-{platform.machine()}".lower(), int(total[1]) * 1024 if total else 0
    )


def peak_memory_bytes(root: Path = Path("/")) -> int:
    """Highest resident memory of this process since it started; 0 if unknown."""
    peak = re.search(r"^VmHWM:\s+(\d+) kB", _text(root / "proc/self/status"), re.MULTILINE)
    return int(peak[1]) * 1024 if peak else 0


def temperature_celsius(root: Path = Path("/")) -> float | None:
    """The hottest thermal zone."""
    zones = (_number(zone / "temp") for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")))
    low, high = _PLAUSIBLE_CELSIUS
    return max((t / 1e3 for t in zones if t is not None and low < t / 1e3 < high), default=None)


class Rails:
    """INA power monitors, as in a Jetson: the power at this moment."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._rails: dict[str, Callable[[], float | None]] = {}
        monitors = {p.resolve() for p in (root / "sys/bus/i2c/drivers").glob("ina*/*/hwmon/hwmon*")}
        monitors |= {
            p.resolve()
            for p in (root / "sys/class/hwmon").glob("hwmon*")
            if _text(p / "name").startswith("ina")
        }
        for monitor in sorted(monitors):
            self._add_hwmon(monitor)
        for monitor in sorted((root / "sys/bus/i2c/drivers").glob("ina*/*/iio:device*")):
            self._add_iio(monitor)

    def _add_hwmon(self, monitor: Path) -> None:
        for power in sorted(monitor.glob("power*_input")):  # microwatts
            number = power.name.removeprefix("power").removesuffix("_input")
            self._add(monitor, _text(monitor / f"power{number}_label"), number, partial(_scaled, power, 1e-6))
        for volts in sorted(monitor.glob("in[0-9]*_input")):  # millivolts, next to milliamperes
            number = volts.name.removeprefix("in").removesuffix("_input")
            amperes, label = monitor / f"curr{number}_input", _text(monitor / f"in{number}_label")
            if amperes.exists() and label and not (monitor / f"power{number}_input").exists():
                self._add(monitor, label, number, partial(_product, volts, amperes))

    def _add_iio(self, monitor: Path) -> None:
        for power in sorted(monitor.glob("in_power*_input")):  # milliwatts
            number = power.name.removeprefix("in_power").removesuffix("_input")
            self._add(monitor, _text(monitor / f"rail_name_{number}"), number, partial(_scaled, power, 1e-3))

    def _add(self, monitor: Path, label: str, number: str, read: Callable[[], float | None]) -> None:
        self._rails[label.strip() or f"{monitor.name}/{number}"] = read

    def __bool__(self) -> bool:
        return bool(self._rails)

    def watts(self) -> float | None:
        """Power of the rail that feeds the whole board, if there is one; otherwise of all rails together."""
        feeding = [read for name, read in self._rails.items() if name.endswith("_IN") or name == "VIN"]
        values = [read() for read in feeding or self._rails.values()]
        known = [value for value in values if value is not None]
        return sum(known) if known else None


class Rapl:
    """Intel's energy counters: mean power since the last reading. On most systems only root can read them."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        folder = root / "sys/class/powercap"
        self._packages = [p for p in sorted(folder.glob("intel-rapl:*")) if p.name.count(":") == 1]
        self._clock = clock
        self._last = self._look()

    def _look(self) -> tuple[float, dict[Path, float]]:
        counts = {package: _number(package / "energy_uj") for package in self._packages}
        return self._clock(), {package: c for package, c in counts.items() if c is not None}

    def __bool__(self) -> bool:
        return bool(self._last[1])

    def watts(self) -> float | None:
        (before, old), (now, new) = self._last, self._look()
        self._last = now, new
        both = old.keys() & new.keys()
        if not both or now <= before:
            return None
        return sum(self._step(package, old[package], new[package]) for package in both) / (now - before)

    def _step(self, package: Path, old: float, new: float) -> float:
        """Joules between two counts; the counter starts again at 0 when it reaches its range."""
        wrapped = (_number(package / "max_energy_range_uj") or 0.0) if new < old else 0.0
        return max(0.0, new - old + wrapped) / 1e6


@dataclass(frozen=True)
class Usage:
    """Power, energy and highest temperature during a task."""

    watts: float | None = None
    joules: float | None = None
    celsius: float | None = None


class Meter:
    """Samples power and temperature in a thread of its own while its block runs."""

    def __init__(
        self,
        root: Path = Path("/"),
        every_seconds: float = SAMPLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._every, self._clock = root, every_seconds, clock
        self._source: Rails | Rapl = Rails(root) or Rapl(root, clock)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="meter", daemon=True)
        self._seconds = self._joules = 0.0
        self._celsius: list[float] = []

    def __enter__(self) -> Meter:
        self._last = self._clock()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.look()

    def _loop(self) -> None:
        while not self._done.wait(self._every):
            self.look()

    def look(self) -> None:
        """Read the power once, and count it for all the time since the last reading."""
        now = self._clock()
        watts, celsius = self._source.watts(), temperature_celsius(self._root)
        if watts is not None and now > self._last:
            self._seconds += now - self._last
            self._joules += watts * (now - self._last)
        if celsius is not None:
            self._celsius.append(celsius)
        self._last = now

    @property
    def usage(self) -> Usage:
        celsius = max(self._celsius, default=None)
        if not self._seconds:
            return Usage(celsius=celsius)
        return Usage(self._joules / self._seconds, self._joules, celsius)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    try:
        return float(_text(path))
    except ValueError:
        return None


def _scaled(path: Path, unit: float) -> float | None:
    value = _number(path)
    return None if value is None else value * unit


def _product(millivolts: Path, milliamperes: Path) -> float | None:
    volts, amperes = _scaled(millivolts, 1e-3), _scaled(milliamperes, 1e-3)
    return None if volts is None or amperes is None else volts * amperes
