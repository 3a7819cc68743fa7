"""What a backup refuses, and what a restore refuses: nothing is overwritten, nothing damaged comes back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from fedel_aggregator.config import AggregatorConfig
from fedel_coordinator.config import CoordinatorConfig, EnrolmentConfig
from fedel_coordinator.migrations import STEPS, migrate
from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import ClientRow, CodeRow, ReportRow, RoundRow, RunRow, Store

from fedel import config
from fedel.backup import manifest
from fedel.backup.making import make
from fedel.backup.mirror import Mirror
from fedel.backup.places import DATABASE, Places
from fedel.backup.restoring import restore
from fedel.chaos.postgres import fresh_database
from fedel.cli.main import main
from fedel.errors import ConfigError, DataError, ServiceError
from fedel.roles.run_state import OPEN
from fedel.security.authority import Authority
from fedel.security.identity import AGENT, Identity

RUNS = [
    RunRow("night-1", '{"x": "ä"}', "{}", 1, "running", 10.5, model_version=3, best_accuracy=0.25),
    RunRow("old", "{}", "{}", 1, "finished", 9.5, ended_at=11.0, model_version=7),
]
CLIENT = ClientRow("night-1", "jetson-1", "orin", 2**40, "0.1", 2**33, True, "{}")
ROUND = RoundRow("night-1", 3, OPEN, '{"tasks": []}', 11.0)
REPORT = ReportRow("night-1", 3, "jetson-1", "{}", '{"train": 1.5}', "{}", 2**35, 5)

CODE = CodeRow("0" * 64, b"\x00\xff a zip", 12.5)


def places(folder: Path, database_url: str = "") -> Places:
    coordinator = CoordinatorConfig(
        listen="127.0.0.1:0",
        database_url=database_url or f"sqlite:///{folder / 'coordinator.db'}",
        enrolment=EnrolmentConfig(str(folder / "ca")),
    )
    return Places(coordinator, (AggregatorConfig(data_dir=folder / "data"),))


def fill(store: Store) -> None:
    for run in RUNS:
        store.create_run(run)
    store.put_client(CLIENT)
    store.put_round(ROUND)
    store.put_report(REPORT)
    store.put_code(CODE)


def write_run(data: Path, name: str, newest: int) -> None:
    for number in (newest - 1, newest):
        write(data / f"runs/{name}/versions/{number:06d}.json", f"{name} {number}")
        write(data / f"runs/{name}/versions/{number:06d}.safetensors", "tensors" * 1000)
    write(data / f"runs/{name}/run.pb", name)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def here(tmp_path: Path) -> Places:
    """What servers that were stopped have left."""
    folder = tmp_path / "here"
    store = SqlStore(f"sqlite:///{_made(folder) / 'coordinator.db'}")
    fill(store)
    store.close()
    data = folder / "data"
    write_run(data, "night-1", 3)
    write_run(data, "old", 7)
    for left in ("lock", "spare/0123", "runs/night-1/rounds/000003/a.part"):
        write(data / left, "not needed")
    write(data / "runs/night-1/rounds/000003/b.update", "an update")
    Authority.create(folder / "ca").issue(folder / "jetson", Identity(AGENT, "jetson-1"), [])
    return places(folder)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def backup(here: Places, tmp_path: Path) -> Path:
    make(tmp_path / "backup", here)
    return tmp_path / "backup"


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_backup_says_what_it_holds(backup: Path) -> None:
    found = manifest.read(backup)
    manifest.verify(backup, found)
    assert ["aggregator-0", "authority", DATABASE] == found.parts
    assert len(STEPS) == found.schema
    assert found.made_at.endswith("Z")
    assert manifest.RunRounds("running", 3, False, {"aggregator-0": 3}) == found.runs["night-1"]
    assert 7 == found.runs["old"].database
    assert set(files_in(backup)) == {*found.files, "manifest.json"}
    assert not [name for name in found.files if "spare" in name or name.endswith((".part", "lock"))]
    assert 0o700 == backup.stat().st_mode & 0o777
    assert [] == list(backup.parent.glob(".backup*"))


def test_everything_comes_back(backup: Path, here: Places, tmp_path: Path) -> None:
    there = places(tmp_path / "there")
    restore(backup, there)
    wanted = {
        name: data
        for name, data in files_in(here.aggregators[0].data_dir).items()
        if "not needed" not in str(data)
    }
    assert wanted == {
        name: data for name, data in files_in(there.aggregators[0].data_dir).items() if name != "lock"
    }
    assert here.authority is not None
    assert there.authority is not None
    assert (here.authority / "ca.key").read_bytes() == (there.authority / "ca.key").read_bytes()
    assert 0o600 == (there.authority / "ca.key").stat().st_mode & 0o777
    assert ["jetson-1"] == [line.name for line in Authority(there.authority).issued()]
    check_rows(there)


def check_rows(there: Places) -> None:
    assert there.coordinator is not None
    store = SqlStore(there.coordinator.database_url)
    running, old = store.runs()
    assert RUNS == [replace(running, created_at=RUNS[0].created_at), old]
    # Another time of creation is another run for the devices: they forget what never happened.
    assert RUNS[0].created_at < running.created_at < RUNS[0].created_at + 1
    assert [CLIENT] == store.clients("night-1")
    assert ROUND == store.round("night-1", 3)
    assert [REPORT] == store.reports("night-1", 3)
    assert CODE == store.code(CODE.sha256)
    store.close()


def test_a_database_may_move_from_sqlite_to_postgresql_and_back(
    backup: Path, tmp_path: Path, postgres_server: str
) -> None:
    there = places(tmp_path / "there", fresh_database(postgres_server))
    restore(backup, there)
    check_rows(there)
    make(tmp_path / "again", there)
    back = places(tmp_path / "back")
    restore(tmp_path / "again", back)
    assert back.coordinator is not None
    store = SqlStore(back.coordinator.database_url)
    assert [CLIENT] == store.clients("night-1")
    assert CODE == store.code(CODE.sha256)
    store.close()


@pytest.mark.parametrize("what", ["data/runs/x/run.pb", "ca/ca.key", "coordinator.db"])
def test_nothing_is_overwritten_without_force(backup: Path, tmp_path: Path, what: str) -> None:
    there = places(tmp_path / "there")
    if what == "coordinator.db":
        assert there.coordinator is not None
        store = SqlStore(f"sqlite:///{_made(tmp_path / 'there') / what}")
        store.create_run(replace(RUNS[0], name="another"))
        store.close()
    else:
        write(tmp_path / "there" / what, "mine")
    before = files_in(tmp_path / "there")
    with pytest.raises(ConfigError, match="--force"):
        restore(backup, there)
    after = files_in(tmp_path / "there")
    assert before == {name: data for name, data in after.items() if name != "data/lock"}
    restore(backup, there, force=True)
    assert not (tmp_path / "there/data/runs/x").exists()
    check_rows(there)


def test_a_folder_in_use_is_not_touched(backup: Path, tmp_path: Path) -> None:
    from fedel_aggregator.server import lock_folder

    with lock_folder(tmp_path / "there/data"), pytest.raises(ServiceError, match="another aggregator"):
        restore(backup, places(tmp_path / "there"), force=True)


@pytest.mark.parametrize("damage", ["changed", "missing", "manifest", "outside"])
def test_a_damaged_backup_is_refused_before_anything_is_changed(
    backup: Path, tmp_path: Path, damage: str
) -> None:
    victim = next(path for path in backup.rglob("*.safetensors"))
    text = (backup / "manifest.json").read_text(encoding="utf-8")
    if damage == "changed":
        data = bytearray(victim.read_bytes())
        data[100] ^= 1
        victim.write_bytes(data)
    elif damage == "missing":
        victim.unlink()
    elif damage == "manifest":
        write(backup / "manifest.json", text[:100])
    else:
        write(backup / "manifest.json", text.replace('"authority/ca.key"', '"authority/../../ca.key"'))
    with pytest.raises((DataError, ConfigError)):
        restore(backup, places(tmp_path / "there"))
    assert not (tmp_path / "there").exists()
    assert 0 != main(["backup", "--verify", str(backup)])


def test_a_newer_schema_is_refused(backup: Path, tmp_path: Path) -> None:
    path = backup / "manifest.json"
    text = path.read_text(encoding="utf-8").replace(f'"schema": {len(STEPS)}', '"schema": 99')
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"version 99, this FedEL knows \d+: use the version"):
        restore(backup, places(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_the_database_of_an_older_version_comes_back_with_the_new_schema(here: Places, tmp_path: Path) -> None:
    assert here.coordinator is not None
    Path(here.coordinator.database_url.removeprefix("sqlite:///")).unlink()
    engine = sa.create_engine(here.coordinator.database_url)
    with engine.begin() as connection:
        migrate(connection, STEPS[:2])
        for name, row in (("runs", RUNS[0]), ("clients", CLIENT), ("rounds", ROUND)):
            there = {column["name"] for column in sa.inspect(connection).get_columns(name)}
            values = {key: value for key, value in asdict(row).items() if key in there}
            connection.execute(sa.insert(sa.table(name, *map(sa.column, values))).values(values))
    engine.dispose()
    make(tmp_path / "backup", here)
    assert 2 == manifest.read(tmp_path / "backup").schema
    new = places(tmp_path / "there")
    restore(tmp_path / "backup", new)
    assert new.coordinator is not None
    store = SqlStore(new.coordinator.database_url)
    assert ([CLIENT], ROUND) == (store.clients("night-1"), store.round("night-1", 3))
    store.close()


def test_a_backup_that_fails_leaves_nothing(here: Places, tmp_path: Path) -> None:
    shutil.rmtree(here.authority or "")
    with pytest.raises(DataError, match=r"ca\.key"):
        make(tmp_path / "backup", here)
    assert ["here"] == [path.name for path in tmp_path.iterdir()]


def test_a_backup_is_not_written_over(here: Places, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        make(tmp_path / "backup", here)


def test_without_a_database_there_is_nothing_to_back_up(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="there is no database"):
        make(tmp_path / "backup", places(tmp_path))
    assert not (tmp_path / "coordinator.db").exists()


def test_rounds_that_do_not_belong_together_are_named(backup: Path) -> None:
    found = manifest.read(backup)
    ahead = manifest.RunRounds(aggregators={"aggregator-0": 5})
    behind = replace(found, runs={"night-1": ahead, "old": ahead})
    alone = replace(found, runs={"night-1": manifest.RunRounds("running", 3, True)})
    assert ["run 'night-1': aggregator-0 is at round 5, the database at 3: it cannot go on from this"] == (
        manifest.mismatches([alone, behind])
    )
    one_ahead = replace(found, runs={"night-1": manifest.RunRounds(aggregators={"aggregator-0": 4})})
    assert [] == manifest.mismatches([alone, one_ahead])
    open_one = replace(found, runs={"night-1": manifest.RunRounds("running", 3, False)})
    assert [] == manifest.mismatches([open_one, one_ahead])
    halves = replace(found, runs={"night-1": manifest.RunRounds(aggregators={"a": 4, "b": 3})})
    assert 1 == len(manifest.mismatches([open_one, halves]))


def test_a_mirror_follows_what_changes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write(source / "a/1", "one")
    write(source / "a/2", "two")
    mirror = Mirror(source, target)
    mirror.update()
    kept = (target / "a/1").stat().st_ino
    (source / "a/2").unlink()
    write(source / "b/3", "three")
    mirror.settle()
    assert {"a/1": b"one", "b/3": b"three"} == files_in(target)
    assert {"a/1", "b/3"} == mirror.files.keys()
    assert kept == (target / "a/1").stat().st_ino, "it was copied again"


@pytest.fixture
def files(here: Places, tmp_path: Path) -> Iterator[list[str]]:
    """Configuration files as the options of the command."""
    assert here.coordinator is not None
    enrolment = {"authority": str(here.authority)}
    coordinator = {
        "database_url": here.coordinator.database_url,
        "listen": "127.0.0.1:0",
        "enrolment": enrolment,
    }
    write(tmp_path / "c.toml", config.write(coordinator))
    write(tmp_path / "a.toml", config.write({"data_dir": str(here.aggregators[0].data_dir)}))
    return ["--coordinator", str(tmp_path / "c.toml"), "--aggregator", str(tmp_path / "a.toml")]


def test_the_commands(tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "backup")
    assert 0 == main(["backup", folder, *files])
    said = capsys.readouterr().out
    assert "night-1: running, database at round 3, aggregator-0 at 3" in said
    assert "rounds waited" in said
    assert 0 == main(["backup", "--verify", folder])
    assert 2 == main(["restore", folder, *files])
    assert "--force" in capsys.readouterr().err
    assert 0 == main(["restore", folder, *files, "--force"])
    assert "start the aggregators, then the coordinator" in capsys.readouterr().out
    assert 2 == main(["backup", str(tmp_path / "other")])
