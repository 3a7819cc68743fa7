import json

import pytest

from fedel.experiments import report, scale
from fedel.experiments.analyses.resources import joules
from fedel.experiments.outcomes import Outcomes
from fedel.experiments.plans import BASELINES, LONGER, plan
from fedel.experiments.scale import Power
from fedel.experiments.stats import Estimate
from tests.experiments import fake_runs


def made(experiment, place, runs, size=None):
    """The section of an experiment of which ``runs`` are there: by label, what ``fake_runs.write`` is told."""
    size = size or fake_runs.scale()
    planned = plan(experiment, size)
    for run in planned:
        if run.label in runs:
            fake_runs.write(run, place, **runs[run.label])
    page = report.make(size, {experiment: planned}, place, {})
    return page, page.sections[0]


TWO = {
    "fedavg": {"accuracies": [0.2, 0.4, 0.4, 0.6], "seconds": 2.0},
    "fedel": {"accuracies": [0.3, 0.5, 0.6, 0.6], "seconds": 1.0},
}


def test_table1_has_what_was_reached_and_when(tmp_path):
    _, section = made("table1", tmp_path, TWO)
    fedavg, fedel = section.tables[0].rows
    assert (Estimate(40.0, 0.0, 2), 56.13) == (fedavg["final %"], fedavg["paper"])
    assert (50.0, 50.0, 56.51, 1.87) == (
        fedel["final %"].mean,
        fedel["best %"].mean,
        fedel["paper"],
        fedel["paper's"],
    )
    assert pytest.approx(2.0) == fedel["speed-up"].mean
    assert pytest.approx(4 / 60) == fedel["min"].mean
    assert pytest.approx(8 / 60) == fedel["min, whole step"].mean
    # Means of four at most: 30, 40, 46.7, 50; FedAvg ends at 40.
    assert pytest.approx(2 / 60) == fedel["min to target"].mean
    assert pytest.approx(8 / 60) == fedavg["min to target"].mean
    # FedEL is over after 4 s, when FedAvg has been tested twice.
    assert [30.0, 50.0] == [round(row["then %"].mean, 6) for row in (fedavg, fedel)]


def test_claims_hold_do_not_hold_or_wait_for_runs(tmp_path):
    _, section = made("table1", tmp_path, TWO)
    words = {verdict.claim.partition(": ")[2]: verdict.word for verdict in section.verdicts}
    assert "holds" == words["FedEL ends at most 1 point below FedAvg"]
    assert "holds" == words["FedEL is at least 1.8 times faster than FedAvg"]
    assert "holds" == words["in the time of FedEL's run, FedAvg gets a worse result"]
    assert "not known yet" == words["no baseline reaches FedAvg's final metric sooner than FedEL"]
    assert 6 == len(section.missing)
    assert "cifar10 heterofl, seed 1, 2" in section.missing


def test_a_baseline_that_is_sooner_refutes_the_claim(tmp_path):
    sooner = {"timelyfl": {"accuracies": [0.6] * 4, "seconds": 1.0}}
    _, section = made("table1", tmp_path, {**TWO, **sooner})
    (verdict,) = [v for v in section.verdicts if "sooner" in v.claim]
    assert verdict.holds is False
    assert "timelyfl" in verdict.numbers


def test_perplexity_is_better_when_lower(tmp_path):
    task = scale.Task("words", fake_runs.JOB, metric="perplexity")
    runs = {
        "fedavg": {"accuracies": [0.1] * 4, "losses": [2.0] * 4, "seconds": 4.0},
        "fedel": {"accuracies": [0.1] * 4, "losses": [1.0] * 4, "seconds": 1.0},
    }
    _, section = made("table1", tmp_path, runs, fake_runs.scale(tasks={"text": task}))
    fedel = section.tables[0].rows[1]
    assert pytest.approx(2.71828, rel=1e-5) == fedel["final"].mean == fedel["best"].mean
    assert section.verdicts[0].holds
    assert "63.21" == section.verdicts[0].numbers  # percent below e**2


def test_deviation_is_that_of_the_slowest_client(tmp_path):
    """T_th of a round is 1 s; the Xavier takes 1.05 s of it, the Orin half."""
    runs = {
        "fedavg": {"accuracies": [0.1], "seconds": 2.0},
        "fedel": {"accuracies": [0.1, 0.1], "seconds": 1.05},
        "fedel, whole step": {"accuracies": [0.1], "seconds": 1.5},
    }
    _, section = made("deviation", tmp_path, runs)
    backward, *_, whole = section.tables[0].rows
    assert pytest.approx(5.0) == backward["round %"].mean
    assert pytest.approx(100 * (0.05 - 0.475) / 2) == backward["per client %"].mean
    assert (
        pytest.approx(-5.5) == backward["without probe %"].mean
    )  # ten steps take 0.945 s, their probe 0.105 s
    assert pytest.approx(2.0) == backward["FedAvg's round / T_th"]
    assert pytest.approx(50.0) == whole["round %"].mean
    assert section.verdicts[0].holds  # the paper's is 6.1 %


def test_fedel_with_more_rounds_is_held_against_every_baseline_in_time(tmp_path):
    slower = {name: {"accuracies": [0.1] * 4} for name in BASELINES if name != "fedavg"}
    longer = {"accuracies": [0.2, 0.2, 0.3, 0.3, 0.4, 0.5, 0.6, 0.7], "seconds": 0.5}
    _, section = made("longer", tmp_path, {**slower, **TWO, LONGER: longer})
    assert [4, 8] == [row["rounds"] for row in section.tables[0].rows[-2:]]
    # FedAvg ends at 40, the mean of its four tests; 0.3 to 0.6 are FedEL's first four with a larger one.
    assert "minutes: FedEL 0.06 ± 0.00; fastest other method fedavg, 0.13" == section.verdicts[0].numbers
    assert section.verdicts[0].holds


def test_rollback_compares_o1_seed_by_seed(tmp_path):
    runs = {"rollback": {"accuracies": [0.1], "o1": 6.0}, "no-rollback": {"accuracies": [0.1], "o1": 8.0}}
    _, section = made("rollback", tmp_path, runs)
    assert [6.0, 8.0] == [row["O1 mean"].mean for row in section.tables[0].rows]
    assert (True, "smaller by 2.00 ± 0.00") == (section.verdicts[0].holds, section.verdicts[0].numbers)


def test_a_smaller_budget_is_compared_at_equal_time(tmp_path):
    """All stop when the shortest ends, after 4 s: the full budget has done two of its rounds by then."""
    runs = {
        "fedavg": TWO["fedavg"],
        "T_th x 0.5": {"accuracies": [0.3] * 4, "seconds": 1.0},
        "T_th x 0.75": {"accuracies": [0.1, 0.4, 0.5, 0.6], "seconds": 1.5},
        "T_th x 1": {"accuracies": [0.5, 0.7, 0.8, 0.9], "seconds": 2.0},
    }
    _, section = made("budget", tmp_path, runs)
    assert [30.0, 25.0, 60.0] == [round(row["at equal time"].mean, 6) for row in section.tables[1].rows]
    assert section.verdicts[0].holds is False


def test_energy_is_watts_times_seconds(tmp_path):
    """A round lasts 2 s by the whole step: the Orin trains for 1 s of it and waits 1 s, the Xavier trains."""
    size = fake_runs.scale()
    runs = plan("window", size)[:1]
    fake_runs.write(runs[0], tmp_path, [0.1, 0.1], seconds=1.0)
    (outcome,) = Outcomes(size, runs, tmp_path).found
    power = {"orin": Power(20, 5), "xavier": Power(10, 5)}
    assert pytest.approx(2 * (20 * 1 + 5 * 1 + 10 * 2)) == joules(outcome, power)


def test_statistics_pair_the_seeds(tmp_path):
    _, section = made("statistics", tmp_path, TWO)
    (row,) = section.tables[0].rows
    assert ("fedavg", 2, 10.0) == (row["FedEL against"], row["pairs"], round(row["mean difference"], 6))


@pytest.mark.parametrize("experiment", ["window", "beta", "selection", "devices", "composition"])
def test_experiments_of_which_little_is_there_are_shown(experiment, tmp_path):
    labels = [run.label for run in plan(experiment, fake_runs.scale())]
    _, section = made(experiment, tmp_path, {labels[0]: {"accuracies": [0.1, 0.2]}})
    assert section.tables
    assert section.missing


def test_the_page_and_its_twin_hold_the_numbers(tmp_path):
    page, _ = made("table1", tmp_path / "runs", TWO)
    written = report.write(page, tmp_path / "out", tmp_path / "docs" / "results.md")
    html, twin = written[0].read_text(), (tmp_path / "docs" / "results.md").read_text()
    for text in (html, twin):
        assert "50.0 ± 0.0" in text
        assert "heterofl, seed 1, 2" in text
        assert "claims on" in text
        assert "Nothing was trained for this." in text
    assert "<svg" in html
    assert "num_steps = 10" in html  # the configuration of each run
    assert (tmp_path / "docs" / "img" / "results" / "table1-cifar10.svg").exists()
    assert "img/results/table1-cifar10.svg" in twin
    figures = json.loads((tmp_path / "out" / "results.json").read_text())
    assert 50.0 == figures["sections"][0]["tables"][0]["rows"][1]["final %"]["mean"]


def test_with_nothing_done_everything_is_missing(tmp_path):
    page, section = made("window", tmp_path, {})
    report.write(page, tmp_path)
    assert 3 == len(section.missing)
    assert "0 of 6 runs are done" in (tmp_path / "results.md").read_text()
