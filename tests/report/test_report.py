"""The page of good, empty, broken and large runs, and the files beside it."""

import csv
import json
import re
from dataclasses import replace

import pytest

from fedel.cli.main import main
from fedel.errors import ConfigError
from fedel.records import ExitRow, ExitTable
from fedel.report import page, plots, runs
from fedel.report.about import about
from fedel.report.client_plots import groups, seconds_by_phase, time_by_client
from fedel.report.figures import figures, table
from fedel.report.verdicts import verdicts
from fedel.report.words import clocks_note
from tests.report.fakes import client_record
from tests.report.made import write_run


@pytest.fixture
def pair(tmp_path):
    fast = write_run(tmp_path / "fast", "fedel", 1.0, [0.1, 0.5, 0.7], window=(1, 2))
    slow = write_run(tmp_path / "slow", "fedavg", 4.0, [0.2, None, 0.6])
    return [fast, slow]


def test_a_run_knows_its_time_and_its_curve(pair):
    fast, slow = pair
    assert [(0, 1.0, 0.1), (1, 2.0, 0.5), (2, 3.0, 0.7)] == fast.accuracies()
    assert [(4.0, 0.2), (12.0, 0.6)] == slow.curve()
    assert [0.2, pytest.approx(0.4)] == slow.means()


def test_an_average_is_named(pair, tmp_path):
    fast, slow = pair
    told = "The tested model of fedel is an average over versions, of which 75 % stays in each round"
    assert [] == page.averaged(pair)
    averaged = replace(fast, settings={**fast.settings, "server": {"average": 0.75, "momentum": 0.0}})
    assert told in page.write([averaged, slow], tmp_path).read_text()
    assert told in (tmp_path / "report.md").read_text()


def test_a_probe_on_top_of_the_budget_is_named(tmp_path):
    told = "The importance probe of FedEL comes on top of T_th, as in the paper; here it takes 40.0 % of T_th."
    probing = write_run(tmp_path / "probing", "fedel", 1.4, [0.1, 0.5], virtual=True, scope="backward")
    assert told in page.write([probing], tmp_path).read_text()
    inside = {**probing.settings, "strategy": {"name": "fedel", "probe_in_budget": True}}
    assert [] == page.probed([replace(probing, settings=inside)])
    quick = write_run(tmp_path / "quick", "fedel", 1.01, [0.1, 0.5], virtual=True, scope="backward")
    other = write_run(tmp_path / "other", "fedavg", 1.4, [0.1, 0.5], virtual=True, scope="backward")
    real = write_run(tmp_path / "real", "fedel", 1.4, [0.1, 0.5], scope="train")
    whole = write_run(tmp_path / "whole", "fedel", 1.4, [0.1, 0.5], virtual=True, scope="round")
    assert [] == page.probed([quick, other, real, whole])


def test_the_page_stands_alone_with_every_picture_and_a_markdown_twin(pair, tmp_path):
    written = page.write(pair, tmp_path)
    text = written.read_text()
    assert 3 == text.count("<p class=about>")
    assert len(page.PICTURES) == text.count("<figure><svg")
    assert not re.search(r'(?:src|href)="https?:', text)
    assert "<td>70.0 %</td>" in text
    assert "| FedAvg | 3 | 40.0 % | 60.0 % | 60.0 % |" in (tmp_path / "report.md").read_text()
    for title in ("Accuracy by time", "Accuracy by round", "Loss", "Where the seconds of a round go"):
        assert f"<h2>{title}</h2>" in text


def test_below_the_title_is_what_was_run(tmp_path):
    split = '[partition]\nmethod = "dirichlet"\nalpha = 0.3\nnum_clients = 20\n[rounds]\nnum_participants = 8\n'
    run = write_run(tmp_path / "night", accuracies=[0.1], virtual=True, scope="backward", settings=split)
    said = (
        "run night · model cnn · data digits, split dirichlet 0.3 · 20 clients, 8 per round · seed 3 · "
        "simulated: backward passes only · FedEL 1.2.3 · 20"
    )
    (line,) = about([run])
    assert line.startswith(said)
    other = write_run(tmp_path / "other", "fedavg", accuracies=[0.1], virtual=True, scope="backward")
    shared, first, second = about([run, other])
    assert "model cnn · seed 3" in shared
    assert first.startswith("FedEL: run night · data digits, split")
    assert second.startswith("FedAvg: run other · data digits · 2 clients")


def test_seconds_of_a_simulation_are_virtual_in_axes_heads_and_notes(tmp_path):
    run = write_run(tmp_path / "x", accuracies=[0.1, 0.2], virtual=True, scope="backward")
    text = page.write([run], tmp_path).read_text()
    for words in (
        "virtual time (s; backward passes only)",
        "<th>virtual s/round</th><th>virtual s</th>",
        "Seconds are virtual: computed for the simulated devices, not measured. They count backward passes",
    ):
        assert words in text
    real = write_run(tmp_path / "y", accuracies=[0.1, 0.2])
    assert "virtual" not in " ".join([*table([real]).heads, clocks_note([real]), *verdicts([real])])


def test_seconds_are_a_mean_over_the_last_rounds(tmp_path):
    run = write_run(tmp_path / "x", "fedel", 1.0, [0.1, 0.2])
    first = replace(run.rounds[0].clients[0], phases={"download": 9.0, "train": 1.0})
    second = replace(run.rounds[1].clients[0], phases={"download": 0.25, "train": 0.5})
    rounds = [replace(r, clients=(e,)) for r, e in zip(run.rounds, (first, second), strict=True)]
    spent = replace(run, rounds=rounds).seconds_by_phase(1)["one"]
    assert (0.25, 0.5, 0.25) == (spent["download"], spent["train"], spent["idle"])


HUGE = 1e308
BROKEN = {
    "no client": {"clients": ()},
    "no update": {
        "clients": (),
        "num_updates": 0,
        "loss": None,
        "accuracy": None,
        "refused": {"one": "a | b\nc"},
    },
    "no time": {"latency_seconds": 0.0, "clients": (client_record(budget_seconds=0.0, train_seconds=0.0),)},
    "no tensor": {"clients": (client_record(selected=(), num_selected=0, deviation=None),)},
    "huge numbers": {
        "latency_seconds": HUGE,
        "loss": HUGE,
        "test_loss": -HUGE,
        "clients": (client_record(train_seconds=HUGE, deviation=HUGE, budget_seconds=HUGE),),
        "opened_at": HUGE,
    },
    "negative time": {"latency_seconds": -1.0, "collect_seconds": -5.0},
    "a jump in rounds": {"round": 10**6},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=list(BROKEN))
def test_every_run_has_a_page_however_broken_its_rounds_are(broken, tmp_path):
    run = write_run(tmp_path / "x", accuracies=[0.1, 0.1], of_round=lambda _: broken)
    assert len(page.PICTURES) == page.write([run], tmp_path).read_text().count("<figure><svg")


def test_broken_runs_have_a_page_together(tmp_path):
    found = [
        write_run(tmp_path / str(i), accuracies=[0.1], of_round=lambda _, broken=broken: broken)
        for i, broken in enumerate([{}, *BROKEN.values()])
    ]
    text = page.write(found, tmp_path).read_text()
    assert all(f"<td>FedEL ({i})</td>" in text for i in range(len(found)))


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_without_a_round_has_a_page(finished, tmp_path):
    run = write_run(tmp_path / "x", finished=finished)
    text = page.write([run], tmp_path).read_text()
    assert "FedEL: no round is closed." in text
    assert "no round was tested" in text
    (run.path / "rounds.jsonl").unlink()
    assert [] == runs.load(run.path).rounds


def test_updates_that_did_not_count_are_listed_by_reason(tmp_path):
    diverged = "the report of client '{}': loss is {}: training diverged, try a lower learning rate"
    refused = {"one": diverged.format("one", "nan"), "two": diverged.format("two", "inf")}
    run = write_run(
        tmp_path / "x", accuracies=[0.1] * 2, of_round=lambda n: {"refused": refused, "dropped": ("three",)}
    )
    text = page.write([run], tmp_path).read_text()
    why = "loss is nan: training diverged, try a lower learning rate"
    assert f"<td>FedEL</td><td>4</td><td>rounds 1 to 2</td><td>one, two</td><td>{why}</td>" in text
    assert "<td>2</td><td>rounds 1 to 2</td><td>three</td><td>no update came" in text
    assert f"| FedEL | 4 | rounds 1 to 2 | one, two | {why} |" in (tmp_path / "report.md").read_text()


def test_clients_are_coloured_by_device_type_in_the_order_people_count(tmp_path):
    types = ["orin/10", "orin", "orin/2"]
    clients = tuple(client_record(client=f"c{i}", device_type=types[i % 3]) for i in range(30))
    run = write_run(tmp_path / "x", accuracies=[0.1], of_round=lambda _: {"clients": clients})
    assert set(types) == set(groups([run]).values())
    svg = plots.draw(page.PICTURES[3][2], [run])
    names = re.findall(r">(orin[/\d]*|T_th|c\d+)</text>", svg)
    assert ["orin", "orin/2", "orin/10", "T_th"] == names


def test_a_run_without_updates_takes_no_ticks_from_the_others(pair, tmp_path):
    alone = plots.draw(time_by_client, pair[:1])
    lost = write_run(tmp_path / "lost", "heterofl", accuracies=[0.1], of_round=lambda _: {"clients": ()})
    both = plots.draw(time_by_client, [pair[0], lost])
    seconds = re.findall(r">(\d\.\d+)</text>", alone)
    assert seconds
    assert seconds == re.findall(r">(\d\.\d+)</text>", both)


def test_few_clients_of_one_type_have_a_colour_and_a_map_each(tmp_path):
    clients = tuple(client_record(client=f"c{i}", device_type="pi", window=(1, 2)) for i in range(8))
    run = write_run(tmp_path / "x", accuracies=[0.1], of_round=lambda _: {"clients": clients})
    svg = plots.draw(page.PICTURES[6][2], [run])
    assert [f"c{i} (pi)" for i in range(8)] == re.findall(r">(c\d+ \(pi\))</text>", svg)
    assert {f"c{i}" for i in range(8)} == set(groups([run]).values())


def test_equal_curves_of_bytes_share_a_line_and_say_so(pair):
    svg = plots.draw(plots.bytes_by_round, pair)
    assert ["FedEL up", "= FedAvg up", "FedEL down", "= FedAvg down"] == re.findall(
        r">([= \w]*(?:up|down))<", svg
    )


def test_the_same_runs_give_the_same_page(pair, tmp_path):
    first = page.write(pair, tmp_path).read_bytes()
    assert first == page.write(pair, tmp_path).read_bytes()


def test_a_name_cannot_inject_markup(tmp_path):
    run = write_run(tmp_path / "x", "<script>alert(1)</script>", 1.0, [0.1])
    evil = replace(run.rounds[0], refused={"<script>": "<script>"})
    assert "<script>" not in page.write([replace(run, rounds=[evil])], tmp_path).read_text()


def test_a_directory_that_is_not_of_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"is not the directory of a run: it has none of rounds\.jsonl"):
        runs.load(tmp_path)
    with pytest.raises(ConfigError, match="no such run"):
        runs.load(tmp_path / "none")


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    run = write_run(tmp_path / "x", accuracies=[0.1, 0.2])
    file = run.path / "rounds.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert run.rounds[:1] == runs.load(run.path).rounds
    file.write_bytes(whole[:-1])
    assert run.rounds == runs.load(run.path).rounds


@pytest.mark.parametrize(
    "head",
    [b"", b"\xff" * 8, b'{"b": {"shape": "x"}}', b'{"b": 3}', b"[1]", b"{" * 2000, b'{"b": {"shape": [[]]}}'],
)
def test_a_damaged_model_tells_no_classes(head, tmp_path):
    run = write_run(tmp_path / "x", accuracies=[0.1], num_classes=10)
    assert 10 == run.num_classes
    (run.path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    assert runs.load(run.path).num_classes is None


def test_json_has_numbers(pair, capsys):
    assert 0 == main(["report", str(pair[0].path), "--compare", str(pair[1].path), "--json"])
    first, second = json.loads(capsys.readouterr().out)
    assert {"run": "fast", "strategy": "fedel", "accuracy": 0.7, "rounds": 3, "seconds": 3.0} == {
        key: first[key] for key in ("run", "strategy", "accuracy", "rounds", "seconds")
    }
    assert ("fedavg", 0.6, 6_000_000, False, None) == (
        second["strategy"],
        second["best_accuracy"],
        second["bytes_down"],
        second["virtual"],
        second["num_classes"],
    )
    assert figures(pair[0]).smoothed_accuracy == first["smoothed_accuracy"]


def test_csv_has_one_row_per_round_counted_from_1(pair, tmp_path, capsys):
    first, second = (str(run.path) for run in pair)
    assert 0 == main(["report", first, "--compare", second, second, "--csv", str(tmp_path / "csv")])
    assert {"fast.csv", "slow.csv", "slow-again-1.csv"} == {file.name for file in (tmp_path / "csv").iterdir()}
    with (tmp_path / "csv" / "slow.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [("1", "4.0", "0.2"), ("2", "8.0", ""), ("3", "12.0", "0.6")] == [
        (row["round"], row["seconds"], row["accuracy"]) for row in rows
    ]
    assert "slow.csv" in capsys.readouterr().out


def test_each_picture_is_a_file(pair, tmp_path):
    assert 0 == main(["report", str(pair[0].path), "--figures", str(tmp_path / "figures")])
    assert {f"{name}.svg" for name, *_ in page.PICTURES} == {f.name for f in (tmp_path / "figures").iterdir()}


@pytest.mark.parametrize(("kind", "start"), [("pdf", b"%PDF"), ("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_has_the_format_of_its_name(kind, start, pair, tmp_path):
    files = [tmp_path / f"{name}.{kind}" for name in ("a", "b")]
    for file in files:
        plots.save(plots.bytes_by_round, pair, file)
    assert files[0].read_bytes().startswith(start)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_format_without_pictures_is_a_mistake(pair, capsys):
    assert 0 != main(["report", str(pair[0].path), "--format", "pdf"])
    assert "--figures DIR" in capsys.readouterr().err


def exits(run, accuracies=(0.2, 0.55, 0.6), milliseconds=(0.1, 0.3, 0.4)):
    rows = [
        ExitRow(number, f"conv{number}", accuracy, 1000 * number, 4000 * number, spent)
        for number, (accuracy, spent) in enumerate(zip(accuracies, milliseconds, strict=True), start=1)
    ]
    (run.path / "exits.json").write_text(ExitTable(3, 1, "orin", tuple(rows)).to_json())
    return runs.load(run.path)


def test_exits_that_were_measured_have_a_picture_and_a_table(pair, tmp_path):
    found = [exits(pair[0]), pair[1]]
    text = page.write(found, tmp_path).read_text()
    assert "<h2>Accuracy and time of the exits</h2>" in text
    assert "ms per sample" in text
    assert "the model of round 3 on orin, one sample per call" in text
    assert "| FedEL | 2 | conv2 | 55.0 % | 2,000 | 8 | 0.3 |" in (tmp_path / "report.md").read_text()
    svg = plots.draw(page.EXITS[2], found)
    assert [">1<", ">2<", ">3<"] == [mark for mark in (">1<", ">2<", ">3<") if mark in svg]
    assert "exits.svg" in {file.name for file in page.save_pictures(found, tmp_path / "figures", "svg")}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"exits": 3}', "null", '{"round":1,"batch_size":1,"machine":"","exits":[]}']
)
def test_damaged_exits_are_left_out(content, pair, tmp_path):
    (pair[0].path / "exits.json").write_text(content)
    text = page.write([runs.load(pair[0].path)], tmp_path).read_text()
    assert "conv" not in text


def test_exits_that_no_axis_holds_do_not_end_the_report(pair, tmp_path):
    odd = exits(pair[0], (1e300, 0.5, 0.1), (0.0, 1e200, 1e-300))
    assert "<h2>Exits</h2>" in page.write([odd], tmp_path).read_text()
    nothing = exits(pair[0], (1e300,) * 3, (1e200,) * 3)
    assert "no numbers that can be drawn" in page.write([nothing], tmp_path).read_text()


def test_many_clients_are_shown_by_device_type(tmp_path):
    def of_round(number):
        clients = [
            client_record(client=f"c-{each}", device_type=f"phone-{each % 2 * 8 + 2}", train_seconds=1.0 + each)
            for each in range(100)
        ]
        return {"clients": tuple(clients), "latency_seconds": 100.0}

    run = write_run(tmp_path / "many", accuracies=[0.1, 0.2], window=(1, 2), of_round=of_round)
    svg = plots.draw(seconds_by_phase, [run])
    assert "phone-2 (50 clients)" in svg
    assert svg.index("phone-10 (50 clients)") < svg.index("phone-2 (50 clients)"), "the first bar is on top"
    assert "c-7" not in svg
    maps = plots.draw(page.PICTURES[6][2], [run])
    assert [2, 0] == [maps.count("phone-"), maps.count("c-99")]
