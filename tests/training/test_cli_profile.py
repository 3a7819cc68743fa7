"""``fedel profile``: what a user sees, and what a script reads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from fedel.cli.profile import add_parser
from fedel.errors import ConfigError
from fedel.training.profile_io import load_profile


def fedel(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="fedel")
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["profile", *arguments])
    return int(args.run(args))


SMALL = ("--model", "cnn", "--batch-size", "2", "--rounds", "1")


def test_a_table_a_summary_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cnn.json"
    assert fedel(*SMALL, "--widths", "0.5", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert "whole step" in shown
    assert "width 0.5" in shown
    profile = load_profile(out)
    assert all(t.name.split(".", 2)[-1] in shown for t in profile.tensors)


def test_json_for_scripts_is_the_profile_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert fedel(*SMALL, "--json") == 0
    assert json.loads(capsys.readouterr().out)["batch_size"] == 2


def test_help_fits_a_screen_and_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fedel("--help")
    shown = capsys.readouterr().out
    assert "example:" in shown
    assert len(shown.splitlines()) <= 45


def test_wrong_devices_and_missing_shapes_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match="use cpu, cuda"):
        fedel(*SMALL, "--device", "tpu7")
    with pytest.raises(ConfigError, match="--input"):
        fedel("--model", "my.models:build")
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        fedel(*SMALL, "--option", "width")
