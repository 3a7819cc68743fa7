"""What a run of a federation made, in a directory of this machine: the run is followed to its end, then its
records, its result and its models are downloaded. What is there already, and whole, is not fetched again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedel_coordinator.run_directory import RunDirectory
from rich.console import Console

from fedel import config
from fedel.data.model_input import FILE as INPUT_FILE
from fedel.data.model_input import ModelInput
from fedel.desk.screen import Screen
from fedel.desk.submit import follow, look, result_of, save_model
from fedel.errors import ConfigError
from fedel.files import write_atomic
from fedel.job import RunConfig
from fedel.records import RoundRecord, RunResult, best_of
from fedel.security.tls import Tls
from fedel.serialisation import from_json, parse_json
from fedel.v1 import coordinator_pb2 as pb

FILES = {"config.toml", "rounds.jsonl", "result.json", "model.safetensors", "best.safetensors", INPUT_FILE}
"""Of a run, in its directory."""
_KEPT = re.compile(r"model-\d+\.safetensors")
"""The model after so many rounds (``rounds.keep_every``)."""
ENDED = (pb.RUN_PHASE_FINISHED, pb.RUN_PHASE_STOPPED, pb.RUN_PHASE_FAILED)


async def fetched(address: str, name: str, directory: Path, tls: Tls, console: Console) -> pb.RunStatus:
    """``fedel runs fetch``: of a run that is not over, when it ends."""
    status = await look(address, name, tls)
    assert status is not None
    check_folder(directory, parse_json(status.config_json))
    shown = Console(quiet=True) if status.phase in ENDED else console
    records: list[str] = []
    with Screen(shown) as screen:

        def show(status: pb.RunStatus) -> None:
            records.extend(status.rounds_json)
            screen.show(status)

        status = await follow(address, name, show, tls)
    await bring(address, status, records, directory, tls)
    return status


async def bring(
    address: str,
    status: pb.RunStatus,
    records: list[str],
    directory: Path,
    tls: Tls | None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Download a run that is over. ``result.json`` comes last: with it, everything is there."""
    name, files = status.run, RunDirectory(directory)
    if not (directory / "config.toml").exists():
        write_atomic(directory / "config.toml", config.write(settings or parse_json(status.config_json)))
    await _once(directory / "model.safetensors", lambda file: save_model(address, name, file, tls))
    closed = [RoundRecord.from_json(line) for line in records]
    if best := best_of(closed):
        file = directory / "best.safetensors"
        await _once(file, lambda file: save_model(address, name, file, tls, best.version))
    every = RunConfig.parse(settings or parse_json(status.config_json)).rounds.keep_every
    for number, version in ((record.round + 1, record.version) for record in closed):
        if every and version % every == 0:
            file = directory / f"model-{number}.safetensors"
            if not file.exists():
                await save_model(address, name, file, tls, version)
    if not (directory / "rounds.jsonl").exists():
        write_atomic(directory / "rounds.jsonl", "".join(f"{record}\n" for record in records))
    if files.finished and (directory / INPUT_FILE).exists():
        return
    found = await result_of(address, name, tls)
    if found.input_json and not (directory / INPUT_FILE).exists():
        from_json(ModelInput, found.input_json, f"input of run '{name}'").save(directory)
    if not files.finished:
        files.finish(RunResult.from_json(found.result_json, f"result of run '{name}'"))


async def _once(file: Path, download: Callable[[Path], Any]) -> None:
    if not file.exists():
        await download(file)


def check_folder(directory: Path, settings: Mapping[str, Any]) -> None:
    """Take an empty folder up again, and one of the same run; refuse another one."""
    found = {path.name for path in directory.iterdir()} if directory.exists() else set()
    found -= {name for name in found if _KEPT.fullmatch(name)}
    is_same = "config.toml" not in found or sent(config.read(directory / "config.toml")) == sent(settings)
    if not (is_same and found <= FILES):
        raise ConfigError(
            f"{directory} holds another run, or other files: choose another folder (--out) or name (--name), or"
            " delete it"
        )


def sent(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What desk and servers say alike about a run; servers complete the options of its method."""
    table = RunConfig.parse(settings).table_to_send()
    return table | {"strategy": table["strategy"].get("name")}


def how_to_come_back(name: str, address: str, certs: str = "") -> str:
    """What to type after this command was left, while the run goes on."""
    at = f"{name} --coordinator {address}" + (f" --certs {certs}" if certs else "")
    return (
        f"run '{name}' goes on at {address}\n  follow it:   fedel status {at} --follow\n"
        f"  its result:  fedel runs fetch {at}\n  stop it:     fedel runs stop {at}"
    )
