"""Commands printed by README, ``--help`` and configuration files work as printed, from the repository."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedel.cli.main import VERBS, parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
BLOCK = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`((?:fedel|python|cd) [^`]+)`")
WRITTEN = {"--out", "--markdown", "--tensorboard", "--dir", "--authority"}
"""Options whose file or folder the command itself makes."""
OF_THE_READER = ("~", "/", "runs/", "request.csr")
"""What the reader has, or made with an earlier command."""


def _commands(lines: Iterator[str] | list[str]) -> list[str]:
    return [line.strip() for line in lines if re.match(r"\s*(sudo )?(fedel|make|python) ", line)]


def _parsers(root: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield root
    for action in root._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _parsers(inner)


def _printed() -> Iterator[tuple[str, str]]:
    blocks = "".join(BLOCK.findall(README)).splitlines()
    for command in _commands(blocks) + SPAN.findall(BLOCK.sub("", README)):
        yield "README.md", command
    for verb in VERBS:
        for each in _parsers(parser(verb)):
            for command in _commands((each.epilog or "").splitlines()):
                yield each.prog, command
    for path in sorted([*ROOT.glob("configs/*.toml"), *ROOT.glob("examples/*.toml")]):
        head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        for command in SPAN.findall("\n".join(head)):
            yield str(path.relative_to(ROOT)), command
    for path in sorted(ROOT.glob("examples/*.py")):
        for command in _commands(path.read_text(encoding="utf-8").partition('"""\n')[0].splitlines()):
            yield str(path.relative_to(ROOT)), command


PRINTED = list(dict.fromkeys(_printed()))


def check(command: str) -> None:
    folder = ROOT
    for part in command.split("&&"):
        words = shlex.split(part, comments=True)
        words = words[1:] if words[0] == "sudo" else words
        program, *rest = words
        if program == "cd":
            folder = folder / rest[0]
        elif program == "make":
            assert rest[0] in TARGETS, f"the Makefile has no target {rest[0]}"
        elif program == "fedel" and rest != ["--help"]:
            assert rest[0] in VERBS, f"fedel has no verb {rest[0]}"
            parser(rest[0]).parse_args(rest)
        _check_files(folder, rest)


def _check_files(folder: Path, words: list[str]) -> None:
    for before, word in zip(["", *words], words, strict=False):
        if before in WRITTEN or word.startswith(OF_THE_READER):
            continue
        if re.search(r"\.(toml|py|json|zip|csr)$", word):
            assert (folder / word).is_file(), f"{word} does not exist"
        elif module := re.fullmatch(r"([a-z_.]+):[a-z_]+", word):
            path = folder / module[1].replace(".", "/")
            assert path.with_suffix(".py").is_file(), f"there is no module {module[1]}"


@pytest.mark.parametrize(("place", "command"), PRINTED)
def test_a_printed_command_is_valid(place: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        check(command)
    except (AssertionError, SystemExit) as error:
        pytest.fail(f"{place} prints `{command}`: {error} {capsys.readouterr().err}")


def test_commands_are_found_everywhere() -> None:
    places = {place for place, _ in PRINTED}
    assert {
        "README.md",
        "fedel run",
        "fedel agent install",
        "configs/simulation.toml",
        "examples/own.toml",
    } <= places
    assert {f"fedel {verb}" for verb in VERBS} <= places


@pytest.mark.parametrize(
    "command",
    ["fedel run configs/digits.toml", "fedel fly", "make nothing", "fedel run examples/own.toml --wings 2"],
)
def test_a_wrong_command_is_noticed(command: str) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        check(command)


def test_the_readme_activates_the_environment_first() -> None:
    for block in BLOCK.findall(README):
        commands = [line for line in block.splitlines() if line.startswith(("fedel ", ". "))]
        assert not commands or commands[0].startswith(". .venv/bin/activate"), block
