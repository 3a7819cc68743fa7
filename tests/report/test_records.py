"""Runs that older versions wrote, damaged files, and what the rounds of a run come to."""

import json

import msgspec
import pytest

from fedel.errors import ConfigError
from fedel.records import RoundRecord, run_result
from fedel.report import runs
from fedel.roles import recorder
from fedel.roles.run_state import TaskResult
from fedel.types import Report
from tests.report.fakes import client_record, result, round_record

ADDED_LATER = {
    "federation": ("best_test_loss", "scope", "clock_seconds", "profile", "partition"),
    "simulation": ("best_version", "model_version", "message"),
}


def write(folder, *lines, **files):
    (folder / "rounds.jsonl").write_text("".join(line + "\n" for line in lines))
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)


@pytest.mark.parametrize("writer", ADDED_LATER)
def test_a_result_of_an_older_version_loads(writer, tmp_path):
    old = msgspec.to_builtins(result(accuracy=0.5))
    old["clients"] = {"one": {"deviation_mean": 0.1, "deviation_max": 0.2, "rounds_measured": 3}}
    for key in ADDED_LATER[writer]:
        del old[key]
    write(tmp_path, round_record().to_json(), result=json.dumps(old))
    found = runs.load(tmp_path).result
    assert found is not None
    assert (0.5, 0.1, "") == (
        found.accuracy,
        found.clients["one"].deviation_mean,
        found.clients["one"].device_type,
    )


def test_a_line_with_nan_loads_as_not_measured(tmp_path):
    line = round_record(clients=(client_record(),)).to_json()
    write(
        tmp_path,
        line.replace('"loss":1.0', '"loss": NaN').replace('"o1":0.0', '"o1":0.0, "test_loss": Infinity'),
    )
    (record,) = runs.load(tmp_path).rounds
    assert (None, None, None) == (record.loss, record.test_loss, record.clients[0].loss)


@pytest.mark.parametrize("line", ["broken", "{}", '{"loss": NaN'])
def test_a_damaged_line_is_named(line, tmp_path):
    write(tmp_path, round_record().to_json(), line)
    with pytest.raises(ConfigError, match=r"rounds\.jsonl, line 2: .*; delete the line to continue"):
        runs.load(tmp_path)


def test_a_damaged_result_is_named(tmp_path):
    write(tmp_path, round_record().to_json(), result='{"run": "night"}')
    with pytest.raises(ConfigError, match=r"result\.json: .* missing required field .*; delete the file"):
        runs.load(tmp_path)


def test_a_run_without_a_result_has_none(tmp_path):
    write(tmp_path, round_record().to_json())
    assert runs.load(tmp_path).result is None


def of_rounds(*records, **changes):
    facts = {"name": "night", "phase": "finished", "strategy": "fedel", "seed": 3, "scope": "train"}
    return run_result(records=records, weights=["a", "b"], wall_seconds=9.0, **facts, **changes)


def test_a_result_has_the_last_and_the_best_test():
    tests = {"accuracy": (0.3, 0.6, None, 0.5), "test_loss": (1.5, 0.9, None, 0.8)}
    records = [
        round_record(round=n, version=n + 1, accuracy=a, test_loss=loss, bytes_up=10)
        for n, (a, loss) in enumerate(zip(*tests.values(), strict=True))
    ]
    found = of_rounds(*records, model_version=4, versions={"torch": "2"})
    assert (0.5, 0.8, 4, 40) == (found.accuracy, found.test_loss, found.rounds, found.bytes_up)
    assert (0.6, 0.8, 1, 2) == (found.best_accuracy, found.best_test_loss, found.best_round, found.best_version)
    assert {"fedel", "python", "numpy", "torch"} == found.versions.keys()


def test_only_a_simulation_has_virtual_seconds():
    clocks = {"backward": 2.0, "train": 3.0}
    records = [round_record(latency_seconds=3.0, clock_seconds=clocks)] * 2
    assert of_rounds(*records).virtual_seconds is None
    found = of_rounds(*records, virtual=True, partition="abc")
    assert (6.0, {"backward": 4.0, "train": 6.0}, "abc") == (
        found.virtual_seconds,
        found.clock_seconds,
        found.partition,
    )


def test_a_run_without_rounds_has_a_result():
    found = of_rounds()
    assert (0, 0, None, None, {}) == (
        found.rounds,
        found.model_version,
        found.accuracy,
        found.best_version,
        found.clients,
    )


def test_a_record_is_the_same_after_its_file():
    record = round_record(clients=(client_record(window=(1, 4)),), clock_seconds={"train": 1.0}, late=("two",))
    assert record == RoundRecord.from_json(record.to_json())


def test_the_seconds_of_a_client_add_up_to_the_round():
    phases = {"download": 1.0, "probe": 0.5, "train": 4.0, "wait": 0.25, "upload": 2.0}
    entry = client_record(phases=phases)
    record = round_record(clients=(entry,), latency_seconds=10.0, collect_seconds=9.0)
    spent = record.seconds_of(entry)
    assert phases | {"idle": 1.25, "commit": 1.0} == spent
    assert 10.0 == sum(spent.values())


def test_without_phases_all_but_the_training_is_idle():
    entry = client_record(train_seconds=4.0)
    spent = round_record(clients=(entry,), latency_seconds=10.0).seconds_of(entry)
    assert (4.0, 6.0, 0.0) == (spent["train"], spent["idle"], spent["commit"])


def test_the_probe_is_told_apart_from_the_training():
    report = Report("one", 0, 10, 4, 4.0, 0.5, train_seconds=2.0, probe_seconds=0.5)
    result = TaskResult(report, phases={"download": 1.0, "train": 2.25})
    phases = recorder.client_record("round", report, None, result, "").phases
    assert {"download": 1.0, "probe": 0.5, "train": 1.75} == phases


def test_a_record_says_how_many_are_late():
    assert ("", ", 2 late") == (round_record().late_note, round_record(num_late=2).late_note)
