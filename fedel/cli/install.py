"""``fedel agent install`` and ``uninstall``: the agent as a systemd service of this device."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedel_edge import device

from fedel import config as configuration
from fedel.cli.certs import enrol_in
from fedel.errors import ConfigError, ServiceError
from fedel.files import write_atomic
from fedel.security.folder import CERT, PUBLIC
from fedel.security.tls import host_of

UNIT, USERS = "fedel-agent.service", "fedel-agent.sysusers"
COMMAND = Path("/opt/fedel/bin/fedel")
"""What the unit starts, unless the command is installed elsewhere."""
STATE, SETTINGS = Path("/var/lib/fedel-agent"), Path("/etc/fedel/agent.toml")
CERTS = SETTINGS.parent / "certs"
UNITS = Path("/etc/systemd/system")
BACKOFF = UNITS / f"{UNIT}.d" / "backoff.conf"
ENROLMENT_PORT = 7072
_BACKOFF_SYSTEMD = 254
"""First version of systemd that can wait longer after each failure."""
_BACKOFF = "[Service]\nRestartSteps=8\nRestartMaxDelaySec=10min\n"
EXAMPLE = """example:
  sudo fedel agent install --coordinator server.lan:7070 --token TOKEN --part 0/4
  sudo fedel agent install --coordinator server.lan:7070 --token TOKEN --dry-run
"""


@dataclass(frozen=True)
class Step:
    """One thing that the installation does."""

    what: str
    do: Callable[[], None]


def add_actions(parser: argparse.ArgumentParser) -> None:
    """The actions of ``fedel agent``; without one the agent runs in the foreground."""
    actions = parser.add_subparsers(dest="action", metavar="install|uninstall")
    adding = actions.add_parser(
        "install",
        help="install the agent as a systemd service",
        description="Install unit, user, configuration and certificate, then run the preflight. A second call "
        "changes only what differs.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = adding.add_argument
    add("--coordinator", default="", metavar="HOST:PORT", help="the coordinator (asked for if not given)")
    add("--token", default="", help="output of `fedel certs token NAME` at the server")
    add(
        "--enrol-at", default="", metavar="HOST:PORT", help=f"default: port {ENROLMENT_PORT} of the coordinator"
    )
    add("--part", default="", metavar="I/N", help="part of the data for this client, counted from 0")
    add("--device", default="", help="cpu or cuda (default: cuda if there is an NVIDIA GPU)")
    add("--no-start", action="store_true", help="start at the next boot, not now")
    removing = actions.add_parser("uninstall", help="remove the service; configuration and state stay")
    for one, run in ((adding, install), (removing, uninstall)):
        one.add_argument(
            "--root",
            type=Path,
            default=Path("/"),
            help="install into this directory tree (an image of a device)",
        )
        one.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
        one.set_defaults(run=run)


def install(arguments: argparse.Namespace) -> int:
    place = Place(arguments.root)
    coordinator = arguments.coordinator or _known(place, "coordinator") or _ask("coordinator", "its host:port")
    token = arguments.token
    if not token and not (place / CERTS / CERT).exists():
        token = _ask("token", "what `fedel certs token NAME` printed at the server")
    settings = _settings(place, arguments, coordinator)
    steps = [
        place.file(UNITS / UNIT, _unit(place)),
        *([place.file(BACKOFF, _BACKOFF)] if _systemd_version() >= _BACKOFF_SYSTEMD else []),
        place.file(Path("/etc/sysusers.d/fedel-agent.conf"), _resource(USERS)),
        place.command("systemd-sysusers", *place.option("--root"), "fedel-agent.conf"),
        place.file(SETTINGS, configuration.write(settings)),
    ]
    if token:
        at = arguments.enrol_at or f"{host_of(coordinator)}:{ENROLMENT_PORT}"
        steps.append(Step(f"enrol at {at}, key and certificate in {place / CERTS}", _enrol(place, at, token)))
    if place.live:
        steps += [
            place.command("systemctl", "daemon-reload"),
            Step("fedel preflight", lambda: _preflight(place)),
        ]
    steps.append(place.command("systemctl", *place.option("--root"), "enable", UNIT))
    if place.live and not arguments.no_start:
        steps.append(place.command("systemctl", "restart", UNIT))
    return _carry_out(steps, arguments.dry_run)


def uninstall(arguments: argparse.Namespace) -> int:
    place = Place(arguments.root)
    now = ["--now"] if place.live else []
    steps = [
        place.command("systemctl", *place.option("--root"), "disable", *now, UNIT),
        *(place.removal(path) for path in (BACKOFF, UNITS / UNIT, Path("/etc/sysusers.d/fedel-agent.conf"))),
        *([place.command("systemctl", "daemon-reload")] if place.live else []),
    ]
    code = _carry_out(steps, arguments.dry_run)
    print(f"{place / SETTINGS.parent} and {place / STATE} stay: they hold the key, models and profiles.")
    return code


class Place:
    """Where the agent is installed: this machine, or a directory tree that will become one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.live = root.absolute() == Path("/")

    def __truediv__(self, path: Path) -> Path:
        return self.root / path.relative_to("/")

    def option(self, name: str) -> list[str]:
        return [] if self.live else [f"{name}={self.root.absolute()}"]

    def file(self, path: Path, text: str) -> Step:
        target, said = self / path, text.rstrip().replace("\n", "\n    ")
        if target.exists() and target.read_text(encoding="utf-8") == text:
            return Step(f"{target} is as it should be", lambda: None)
        shown = f":\n    {said}" if path.suffix == ".toml" else ""
        return Step(f"write {target}{shown}", lambda: write_atomic(target, text, mode=PUBLIC))

    def removal(self, path: Path) -> Step:
        return Step(f"remove {self / path}", lambda: (self / path).unlink(missing_ok=True))

    def command(self, *words: str) -> Step:
        return Step(" ".join(words), lambda: _run(words))


def _carry_out(steps: Sequence[Step], dry_run: bool) -> int:
    for step in steps:
        print(f"{'would ' if dry_run else ''}{step.what}", flush=True)
        if not dry_run:
            step.do()
    return 0


def _run(words: Sequence[str]) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ServiceError(f"{words[0]} was not found: this needs a system with systemd") from None
    if done.returncode:
        hint = "" if os.geteuid() == 0 else "; this needs root (sudo)"
        raise ServiceError(f"`{' '.join(words)}` failed: {done.stderr.strip()}{hint}")


def _unit(place: Place) -> str:
    """The unit; on this machine with the path of the command as installed here."""
    command = Path(sys.executable).with_name("fedel")
    if not place.live or command == COMMAND:
        return _resource(UNIT)
    homes, venv = {Path("/home"), Path("/root"), Path("/run/user")}, COMMAND.parents[1]
    for what, path in (("", command), ("the Python of ", Path(sys.executable).resolve())):
        if homes & set(path.parents):
            named = f"{what}{command}, {path}," if what else str(path)
            raise ConfigError(
                f"{named} is in a home directory, which a service cannot read: install FedEL in {venv}, with a"
                f" Python of the system (/usr/bin/python3 -m venv --system-site-packages {venv}), and run this"
                " command from there"
            )
    return _resource(UNIT).replace(str(COMMAND), str(command))


def _resource(name: str) -> str:
    return (files("fedel_edge") / "systemd" / name).read_text(encoding="utf-8")


def _settings(place: Place, arguments: argparse.Namespace, coordinator: str) -> dict[str, Any]:
    """The existing configuration, changed by the options of this call."""
    file = place / SETTINGS
    table: dict[str, Any] = configuration.read(file) if file.exists() else {}
    table |= {"coordinator": coordinator, "state_dir": str(STATE)}
    table["device"] = arguments.device or table.get("device") or _training_device(place.root)
    table["data"] = {"root": str(STATE / "data"), **table.get("data", {}), **_part(arguments.part)}
    table["tls"] = {**table.get("tls", {}), "dir": str(CERTS)}
    return table


def _part(text: str) -> dict[str, int]:
    if not text:
        return {}
    index, _, of = text.partition("/")
    if not (index.isdecimal() and of.isdecimal() and int(index) < int(of)):
        raise ConfigError(f"--part {text}: write I/N, such as 0/4 for the first of four parts")
    return {"index": int(index), "of": int(of)}


def _training_device(root: Path) -> str:
    jetson = device.facts(root).device_type.startswith("jetson")
    return "cuda" if jetson or (root / "dev/nvidia0").exists() else "cpu"


def _known(place: Place, key: str) -> str:
    file = place / SETTINGS
    return str(configuration.read(file).get(key, "")) if file.exists() else ""


def _ask(option: str, what: str) -> str:
    if not sys.stdin.isatty():
        raise ConfigError(f"add --{option} ({what}): without a terminal there is no prompt")
    return input(f"{option}, {what}: ").strip()


def _enrol(place: Place, at: str, token: str) -> Callable[[], None]:
    def enrol() -> None:
        enrol_in(place / CERTS, token, at)

    return enrol


def _preflight(place: Place) -> None:
    """Show red lines, but do not stop the installation: the agent waits for servers that do not answer yet."""
    from fedel.cli import preflight  # needs rich, which servers do not have

    arguments = argparse.Namespace(config=place / SETTINGS, job=None, set=[], json=False)
    if preflight.main(arguments):
        print("The agent is installed. Repair what is red, then run `fedel preflight` again.")


def _systemd_version() -> int:
    try:
        version = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False).stdout
        return int(version.split()[1])
    except (OSError, IndexError, ValueError):
        return 0
