"""Each kind of damage to one run: the audit says what it is and names the file."""

from __future__ import annotations

import json
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedel_aggregator.tensor_file import TensorFile
from fedel_aggregator.versions import read_meta

from fedel.audit.audit import audit
from fedel.cli.main import main
from fedel.core.budgeted import window_cost
from fedel.types import Window
from tests.audit.runs import NUM_CLIENTS, NUM_ROUNDS, RUN, play, sources
from tests.federation.trainers import clients_of, spec_of

LAST = f"{NUM_ROUNDS:06d}"
OTHER = "night-2"


class Place:
    """The folder of a run, and ways to damage it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shard = folder / "aggregator-0" / "runs" / RUN
        self.versions = self.shard / "versions"
        self.updates = self.shard / "updates"
        self.lines = folder / "runs" / RUN / "rounds.jsonl"

    def flip(self, path: Path, offset: int) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 4
        path.write_bytes(data)

    def cut(self, path: Path, num_bytes: int) -> None:
        path.write_bytes(path.read_bytes()[:-num_bytes])

    def edit(self, path: Path, change: Callable[[Any], None]) -> None:
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))

    def sql(self, statement: str, *values: object) -> None:
        connection = sqlite3.connect(self.folder / "coordinator.db")
        with connection:
            assert connection.execute(statement, values).rowcount == 1
        connection.close()

    def record(self, round_num: int, change: Callable[[Any], None]) -> None:
        """In the database and in rounds.jsonl, as somebody would who wants nobody to notice."""
        lines = self.lines.read_text().splitlines()
        table = json.loads(lines[round_num])
        change(table)
        lines[round_num] = json.dumps(table)
        self.lines.write_text("".join(line + "\n" for line in lines))
        key = (lines[round_num], RUN, round_num)
        self.sql("UPDATE rounds SET record_json = ? WHERE run = ? AND round_num = ?", *key)


def retouch(place: Place) -> None:
    """Another value in a version, with the checksum that belongs to it, in both places that hold it."""
    path = place.versions / f"{LAST}.safetensors"
    with TensorFile(path) as file:
        name, spot = next(iter(file.places.items()))
        values = file.tensor(name, read_meta(place.versions / f"{LAST}.json").crc32[name])
    values.reshape(-1)[0] += np.float32(1)
    data = bytearray(path.read_bytes())
    data[spot.offset : spot.offset + spot.num_bytes] = values.tobytes()
    path.write_bytes(data)
    for meta in (place.versions / f"{LAST}.json", place.updates / f"{NUM_ROUNDS - 1:06d}" / "version.json"):
        place.edit(meta, lambda table: table["crc32"].update({name: zlib.crc32(values.tobytes())}))


def count_in_both(place: Place, change: Callable[[Any], None]) -> None:
    for meta in (place.versions / f"{LAST}.json", place.updates / f"{NUM_ROUNDS - 1:06d}" / "version.json"):
        place.edit(meta, change)


def jump(place: Place, by: int) -> None:
    """The window of a slow client moves too far, or back; its predicted seconds are those of that window."""
    client, spec = clients_of(NUM_CLIENTS)["client-2"], spec_of()
    windows = [json.loads(line)["clients"][2]["window"] for line in place.lines.read_text().splitlines()]
    round_num = next(n for n in range(1, NUM_ROUNDS) if windows[n][1] < spec.num_blocks)
    front = windows[round_num][1] + 1 if by > 0 else windows[round_num - 1][1]

    def change(record: Any) -> None:
        entry = record["clients"][2]
        window = entry["window"] = [min(windows[round_num][0], front), front]
        cost = window_cost(spec, client.profile, entry["selected"], Window(*window))
        entry["predicted_forward_seconds"] = cost.forward_seconds * entry["num_steps"]
        entry["predicted_backward_seconds"] = cost.backward_seconds * entry["num_steps"]

    place.record(round_num, change)


def other(place: Place, path: Path) -> Path:
    """The same file of another run."""
    return Path(str(path).replace(f"/{RUN}/", f"/{OTHER}/"))


DAMAGE: dict[str, tuple[Callable[[Place], object], str, str]] = {
    # what happened: (how, kind, what the finding names)
    "bit flip in a version": (
        lambda p: p.flip(p.versions / f"{LAST}.safetensors", -9),
        "damaged",
        f"{LAST}.safetensors: tensor",
    ),
    "version cut off": (
        lambda p: p.cut(p.versions / f"{LAST}.safetensors", 9),
        "damaged",
        f"{LAST}.safetensors: the tensors of version 6 cannot be read",
    ),
    "table of a version damaged": (
        lambda p: p.flip(p.versions / f"{LAST}.safetensors", 9),
        "damaged",
        f"{LAST}.safetensors: the tensors",
    ),
    "tensors of a version missing": (
        lambda p: (p.versions / f"{LAST}.safetensors").unlink(),
        "missing",
        f"{LAST}.safetensors: the tensors of version 6",
    ),
    "version missing": (
        lambda p: [path.unlink() for path in p.versions.glob(f"{LAST}.*")],
        "missing",
        f"{LAST}.json: version 6 is not there",
    ),
    "labelled version missing": (
        lambda p: p.edit(p.shard / "labels.json", lambda t: t.update(best=3)),
        "missing",
        "labels.json: version 3, labelled 'best'",
    ),
    "checksum in a meta edited": (
        lambda p: p.edit(
            p.versions / f"{LAST}.json", lambda t: t["crc32"].update(dict.fromkeys(t["crc32"], 7))
        ),
        "damaged",
        f"{LAST}.safetensors: tensor",
    ),
    "meta cut off": (
        lambda p: p.cut(p.versions / f"{LAST}.json", 30),
        "damaged",
        f"{LAST}.json: the facts about version 6 cannot be read",
    ),
    "meta of another version": (
        lambda p: shutil.copy(p.versions / f"{NUM_ROUNDS - 1:06d}.json", p.versions / f"{LAST}.json"),
        "differs",
        f"{LAST}.json: it holds the facts about version 5",
    ),
    "meta of another run": (
        lambda p: shutil.copy(other(p, p.versions / f"{LAST}.json"), p.versions / f"{LAST}.json"),
        "damaged",
        f"{LAST}.safetensors: tensor",
    ),
    "header of another run": (
        lambda p: shutil.copy(other(p, p.shard / "run.pb"), p.shard / "run.pb"),
        "differs",
        f"run.pb: it is the header of run '{OTHER}'",
    ),
    "header damaged": (
        lambda p: p.cut(p.shard / "run.pb", 40),
        "damaged",
        "run.pb: the run's header cannot be read",
    ),
    "labels broken": (
        lambda p: p.cut(p.shard / "labels.json", 4),
        "damaged",
        "labels.json: the labels of versions cannot be read",
    ),
    "update bit flip": (
        lambda p: p.flip(p.updates / "000002" / "client-1.update", -5),
        "damaged",
        "000002/client-1.update: a tensor is not what its checksum says",
    ),
    "update cut off": (
        lambda p: p.cut(p.updates / "000002" / "client-1.update", 50),
        "damaged",
        "000002/client-1.update: it is cut off",
    ),
    "header of an update damaged": (
        lambda p: p.flip(p.updates / "000002" / "client-1.update", 2),
        "damaged",
        "000002/client-1.update: the update cannot be read",
    ),
    "update missing": (
        lambda p: (p.updates / "000002" / "client-1.update").unlink(),
        "missing",
        "000002/client-1.update: client 'client-1' counts in round 2 without an update",
    ),
    "update of another client renamed": (
        lambda p: shutil.copy(
            p.updates / "000002" / "client-0.update", p.updates / "000002" / "client-1.update"
        ),
        "differs",
        "000002/client-1.update: it says it is of client 'client-0'",
    ),
    "update of another round": (
        lambda p: shutil.copy(
            p.updates / "000001" / "client-1.update", p.updates / "000002" / "client-1.update"
        ),
        "differs",
        "000002/client-1.update: it says it is of client 'client-1', round 1",
    ),
    "update of another run": (
        lambda p: shutil.copy(
            other(p, p.updates / "000002" / "client-1.update"), p.updates / "000002" / "client-1.update"
        ),
        "differs",
        f"000002/client-1.update: it says it is of client 'client-1', round 2 of run '{OTHER}'",
    ),
    "version and checksum changed together": (
        retouch,
        "differs",
        f"{LAST}.safetensors: tensor",
    ),
    "counted client without an update": (
        lambda p: count_in_both(p, lambda t: t["counted"].update(ghost=[NUM_ROUNDS - 1, "00"])),
        "missing",
        "ghost.update: client 'ghost' counts in round 5 without an update",
    ),
    "client not counted any more": (
        lambda p: count_in_both(p, lambda t: t["counted"].pop("client-0")),
        "differs",
        "counts other clients than",
    ),
    "counted in two versions": (
        lambda p: count_in_both(
            p,
            lambda t: t["counted"].update(
                {
                    "client-0": json.loads((p.updates / "000004" / "version.json").read_text())["counted"][
                        "client-0"
                    ]
                }
            ),
        ),
        "twice",
        "of round 4 also counts in version 5",
    ),
    "row of a round deleted": (
        lambda p: p.sql("DELETE FROM rounds WHERE run = ? AND round_num = 2", RUN),
        "missing",
        "coordinator.db, round 2: there is no row of this round",
    ),
    "row of a client damaged": (
        lambda p: p.sql("UPDATE clients SET profile_json = '{' WHERE run = ? AND client = 'client-2'", RUN),
        "damaged",
        "coordinator.db, client 'client-2': its row cannot be read",
    ),
    "row of the run deleted": (
        lambda p: p.sql("UPDATE runs SET name = 'gone' WHERE name = ?", RUN),
        "missing",
        f"coordinator.db: it has no run '{RUN}'",
    ),
    "database is not one": (
        lambda p: (p.folder / "coordinator.db").write_bytes(b"not a database" * 100),
        "damaged",
        "coordinator.db: the database cannot be read",
    ),
    "record edited": (
        lambda p: p.record(3, lambda t: t["clients"][1].update(loss=0.001)),
        "differs",
        "round 3: what it says about client 'client-1'",
    ),
    "client dropped from a record": (
        lambda p: p.record(3, lambda t: t["clients"].pop()),
        "differs",
        "round 3: 3 updates of 2 clients",
    ),
    "client twice in a record": (
        lambda p: p.record(3, lambda t: t["clients"].append(t["clients"][0])),
        "twice",
        "round 3: client 'client-0' counts twice",
    ),
    "client without a task": (
        lambda p: p.record(3, lambda t: t["clients"][0].update(client="ghost")),
        "illegal",
        "round 3: client 'ghost' counts without a task",
    ),
    "window that jumps": (lambda p: jump(p, 1), "illegal", "client 'client-2' has the window"),
    "window that goes back": (lambda p: jump(p, -1), "illegal", "client 'client-2' has the window"),
    "state of another round": (
        lambda p: p.sql("UPDATE runs SET model_version = 4 WHERE name = ?", RUN),
        "differs",
        "table runs: model_version 4",
    ),
    "state edited": (
        lambda p: p.sql(
            "UPDATE runs SET state_json = replace(state_json, '\"resets\":', '\"resets\":1') WHERE name = ?",
            RUN,
        ),
        "differs",
        "is not that of the last round it counted in",
    ),
    "line of rounds.jsonl dropped": (
        lambda p: p.lines.write_text("".join(p.lines.read_text().splitlines(keepends=True)[:-1])),
        "missing",
        "rounds.jsonl: it has 5 lines, for 6 closed rounds",
    ),
    "line of rounds.jsonl edited": (
        lambda p: p.lines.write_text(p.lines.read_text().replace('"round":2', '"round":9', 1)),
        "differs",
        "rounds.jsonl: line 3 is not the record of round 2",
    ),
    "rounds.jsonl missing": (
        lambda p: p.lines.unlink(),
        "missing",
        "rounds.jsonl: the records of the rounds cannot be read",
    ),
    "aggregators swapped in time": (
        lambda p: (
            [path.unlink() for path in (p.folder / "aggregator-1/runs" / RUN / "versions").glob(f"{LAST}.*")]
            and shutil.rmtree(p.folder / "aggregator-1/runs" / RUN / "updates" / f"{NUM_ROUNDS - 1:06d}")
        ),
        "differs",
        "the newest version is 5, the database says 6",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    where = play(folder, {"name": "fedel"}, names=(RUN, OTHER))
    assert () == audit(where).findings
    return folder


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path: Path, good: Path, case: str) -> None:
    damage, kind, named = DAMAGE[case]
    place = Place(shutil.copytree(good, tmp_path / "run"))
    damage(place)
    found = audit(sources(place.folder)).findings
    assert any(each.kind == kind and named in str(each) for each in found), "\n".join(map(str, found))


def test_damage_ends_with_exit_code_1(tmp_path: Path, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(shutil.copytree(good, tmp_path / "run"))
    (place.updates / "000002" / "client-1.update").unlink()
    assert 1 == main(["audit", RUN, "--aggregator", str(place.folder / "aggregator-0"), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert ["missing"] == [finding["kind"] for finding in result["findings"]]
    versions = (place.folder / "aggregator-0" / "runs" / RUN / "versions").glob("*.safetensors")
    after_gap = min(int(path.stem) for path in versions if int(path.stem) > 2)
    assert [1, 2, *range(after_gap + 1, NUM_ROUNDS + 1)] == sorted(result["recomputed"]), (
        "up to the gap, and from the next version on disk"
    )
