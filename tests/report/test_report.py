import re
from dataclasses import replace

import pytest

from fedel.errors import ConfigError
from fedel.report import page, runs
from tests.report.fakes import client_record, result, round_record


def write_run(path, strategy, latency, accuracies, window=None):
    path.mkdir()
    (path / "config.toml").write_text(f'seed = 3\n[strategy]\nname = "{strategy}"\n')
    lines = []
    for number, accuracy in enumerate(accuracies):
        clients = [
            client_record(client=name, window=window, train_seconds=latency, deviation=latency - 1.0)
            for name in ("one", "two")
        ]
        record = round_record(
            round=number,
            latency_seconds=latency,
            accuracy=accuracy,
            bytes_up=1_000_000,
            bytes_down=2_000_000,
            clients=tuple(clients),
        )
        lines.append(record.to_json() + "\n")
    (path / "rounds.jsonl").write_text("".join(lines))
    (path / "result.json").write_text(result().to_json())
    return runs.load(path)


@pytest.fixture
def pair(tmp_path):
    fast = write_run(tmp_path / "fast", "fedel", 1.0, [0.1, 0.5, 0.7], window=(1, 2))
    slow = write_run(tmp_path / "slow", "fedavg", 4.0, [0.2, None, 0.6])
    return [fast, slow]


def test_a_run_knows_its_time_to_accuracy(pair):
    fast, slow = pair
    assert [(0, 1.0, 0.1), (1, 2.0, 0.5), (2, 3.0, 0.7)] == fast.accuracies()
    assert 2.0 == fast.seconds_to(0.5)
    assert None is fast.seconds_to(0.9)
    assert 12.0 == slow.seconds_to(0.5)


def test_verdicts_compare_the_first_run_with_the_others(pair):
    sentences = " ".join(page.verdicts(pair))
    assert "4.00 times as long" in sentences
    assert "Both reach 60.0 % accuracy" in sentences
    assert "fedel after 3.0 s, fedavg after 12.0 s, a speed-up of 4.00" in sentences


def test_an_average_is_named(pair, tmp_path):
    fast, slow = pair
    told = "The tested model of fedel is an average over versions, of which 75 % stays in each round"
    assert [] == page.averaged(pair)
    averaged = replace(fast, settings={**fast.settings, "server": {"average": 0.75, "momentum": 0.0}})
    assert told in page.write([averaged, slow], tmp_path).read_text()
    assert told in (tmp_path / "report.md").read_text()


def test_the_page_stands_alone_with_every_picture_and_a_markdown_twin(pair, tmp_path):
    written = page.write(pair, tmp_path)
    text = written.read_text()
    assert len(page.PICTURES) == text.count("<figure><svg")
    assert not re.search(r'(?:src|href)="https?:', text)
    assert "<td>70.0 %</td>" in text
    assert "| fedavg | 3 | 60.0 % |" in (tmp_path / "report.md").read_text()


def test_seconds_are_a_mean_over_the_last_rounds(tmp_path):
    run = write_run(tmp_path / "x", "fedel", 1.0, [0.1, 0.2])
    first = replace(run.rounds[0].clients[0], phases={"download": 9.0, "train": 1.0})
    second = replace(run.rounds[1].clients[0], phases={"download": 0.25, "train": 0.5})
    rounds = [replace(r, clients=(e,)) for r, e in zip(run.rounds, (first, second), strict=True)]
    spent = replace(run, rounds=rounds).seconds_by_phase(1)["one"]
    assert (0.25, 0.5, 0.25) == (spent["download"], spent["train"], spent["idle"])


def test_rounds_without_clients_have_a_page(tmp_path):
    run = write_run(tmp_path / "x", "fedel", 1.0, [0.1])
    empty = replace(run, rounds=[replace(run.rounds[0], clients=())])
    assert "Where the seconds of a round go" in page.write([empty], tmp_path).read_text()


def test_the_same_runs_give_the_same_page(pair, tmp_path):
    first = page.write(pair, tmp_path).read_bytes()
    assert first == page.write(pair, tmp_path).read_bytes()


def test_a_name_cannot_inject_markup(tmp_path):
    run = write_run(tmp_path / "x", "<script>alert(1)</script>", 1.0, [0.1])
    assert "<script>" not in page.write([run], tmp_path).read_text()


def test_a_directory_without_rounds_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"rounds\.jsonl: missing"):
        runs.load(tmp_path)
    with pytest.raises(ConfigError, match="no such run"):
        runs.load(tmp_path / "none")
