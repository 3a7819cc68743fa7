"""Options that ``fedel run`` and ``fedel simulate`` share: what a run starts from, and who follows it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedel import tracking
from fedel.errors import ConfigError

LAST, BEST = "last", "best"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="start_from",
        default="",
        metavar="RUN@best",
        help="start from a model of another run: @best (default), @last or @N, the one after N rounds",
    )
    parser.add_argument(
        "--mlflow",
        default="",
        metavar="URL",
        help=f"send settings, rounds and files to this MLflow server (default: ${tracking.ADDRESS})",
    )


def settings(arguments: argparse.Namespace) -> list[str]:
    """``--set``, and what the other options set."""
    overrides: list[str] = list(arguments.set)
    if arguments.start_from:
        # JSON and TOML write a string alike.
        overrides.append(f"workload.initial={json.dumps(str(model_file(arguments.start_from, arguments.out)))}")
    return overrides


def model_file(text: str, runs: Path) -> Path:
    """The model of a run that ``--from`` means; the run is a directory, or the name of one in ``runs``."""
    name, _, which = text.rpartition("@") if "@" in text else (text, "", BEST)
    folder = Path(name) if Path(name).is_dir() else runs / name
    if not name or not folder.is_dir():
        raise ConfigError(f"--from {text}: there is no run '{name}', neither here nor in {runs}")
    kept = {BEST: folder / "best.safetensors", LAST: folder / "model.safetensors"}
    kept |= {file.stem.removeprefix("model-"): file for file in folder.glob("model-*.safetensors")}
    there = {word: file for word, file in kept.items() if file.is_file()}
    if which not in there:
        words = ", ".join(f"@{word}" for word in there)
        raise ConfigError(
            f"--from {text}: {folder} has no such model; it has: {words or 'none'}. A run has @best once a"
            " round was tested, @last once it is over, and @N with rounds.keep_every"
        )
    return there[which]
