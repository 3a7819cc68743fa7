"""``fedel.compare`` and ``fedel compare``: the same seeds for every method, means and intervals over them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import fedel
from fedel import config
from fedel.cli.main import main
from fedel.errors import ConfigError, ModelError, ServiceError
from fedel.experiments import compare as over_seeds
from fedel.report.runs import StoredRun
from fedel.strategies import FedAvg, FedEL
from tests.api.support import ROUNDS, WORKLOAD, job_in, net
from tests.report.fakes import round_record
from tests.simulation import tiny

QUIET: dict[str, Any] = {"executor": "serial", "progress": False}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return job_in(tmp_path)


def made_up(method: str, seed: int, accuracies: list[float], seconds: float = 1.0) -> StoredRun:
    settings = {"seed": seed, "strategy": {"name": method}, "partition": {"num_clients": 2}}
    rounds = [
        round_record(round=number, accuracy=value, latency_seconds=seconds, scope="backward")
        for number, value in enumerate(accuracies)
    ]
    return StoredRun(Path(f"{method}-{seed}"), settings, None, rounds)


def test_figures_by_hand() -> None:
    """FedAvg's rounds take twice as long: when FedEL's 4 rounds are over, it has made 2 of its 4."""
    methods = {
        "FedEL": [made_up("fedel", seed, [0.4 + seed / 10] * 4) for seed in (1, 2, 3)],
        "FedAvg": [made_up("fedavg", seed, [0.1, 0.1, 0.9, 0.9], seconds=2.0) for seed in (1, 2, 3)],
    }
    fedel_figures, fedavg = over_seeds.figures(methods)
    assert (1, 2, 3) == fedavg.seeds
    assert fedel_figures.same_time is not None
    assert fedel_figures.same_rounds is not None
    assert (0.6, 0.6) == (
        pytest.approx(fedel_figures.same_time.mean),
        pytest.approx(fedel_figures.same_rounds.mean),
    )
    assert 0.2484 == pytest.approx(fedel_figures.same_time.half, abs=1e-4)
    assert fedavg.same_time is not None
    assert fedavg.same_rounds is not None
    assert (0.1, 0.5) == (pytest.approx(fedavg.same_time.mean), pytest.approx(fedavg.same_rounds.mean))
    assert fedavg.lead_same_time is not None
    assert -0.5 == pytest.approx(fedavg.lead_same_time.difference.mean)
    assert (4.0, 8.0) == (fedel_figures.seconds.mean, fedavg.seconds.mean)
    said = over_seeds.sentences(methods)
    assert said == [
        "After the same time (4 s virtual, backward passes only): FedEL 60.0 ± 24.8 %, FedAvg 10.0 ± 0.0 %.",
        "FedEL is better than FedAvg after the same time, by 50.0 ± 24.8 points.",
        "After the same rounds (4 rounds): FedEL 60.0 ± 24.8 %, FedAvg 50.0 ± 0.0 %.",
        "FedEL and FedAvg cannot be told apart after the same rounds: they differ by 10.0 ± 24.8 points.",
        "± is half of a 95 % confidence interval over 3 seeds; all methods have the same seeds.",
    ]


def test_one_seed_has_no_interval_and_other_clocks_no_common_time() -> None:
    one = {name: [made_up(name, 1, [0.5] * 4)] for name in ("fedel", "fedavg")}
    said = over_seeds.sentences(one)
    assert "fedel 50.0 %, fedavg 50.0 %" in said[0]
    assert "One seed says nothing about chance" in said[-1]
    assert 3 == len(said)
    whole_steps = replace(one["fedavg"][0], rounds=[replace(r, scope="train") for r in one["fedavg"][0].rounds])
    other = {"fedel": one["fedel"], "fedavg": [whole_steps]}
    assert over_seeds.figures(other)[0].same_time is None
    assert "different clocks" in over_seeds.sentences(other)[0]


def test_only_seeds_that_all_methods_have_are_compared() -> None:
    found = {
        "a": [made_up("a", seed, [0.5]) for seed in (1, 2)],
        "b": [made_up("b", seed, [0.5]) for seed in (2, 3)],
        "c": [],
    }
    equal = over_seeds.with_equal_seeds(found)
    assert {"a": [2], "b": [2]} == {
        label: [run.settings["seed"] for run in runs] for label, runs in equal.items()
    }


def test_the_command_writes_report_csv_and_pictures_and_prints_numbers(
    job: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(config.write({**job, "workload": WORKLOAD}))
    words = ["compare", "small.toml", "--methods", "fedel,fedavg", "--seeds", "2", "--executor", "serial"]
    assert 0 == main([*words, "--csv", "--figures", "--format", "svg", "--json"])
    out, err = capfd.readouterr()
    said = json.loads(out)
    assert ["FedEL", "FedAvg"] == [each["method"] for each in said["methods"]]
    assert [1, 2] == said["methods"][1]["seeds"]
    assert 0 <= said["methods"][0]["same_time"]["mean"] <= 1
    assert said["methods"][0]["same_time"]["half"] >= 0
    assert [1, 2] == [run["seed"] for run in said["runs"]["FedAvg"]]
    assert "[4/4]" in err
    place = tmp_path / "runs" / "compare-small"
    page = (place / "report.html").read_text()
    assert "FedEL and FedAvg: small" in page
    assert "95 % confidence" in page
    assert page.count("<svg") == 8
    assert "| FedAvg | 2 |" in (place / "report.md").read_text()
    assert 4 == len(list((place / "csv").glob("*.csv")))
    assert {"accuracy-by-time.svg", "bytes.svg"} <= {file.name for file in (place / "figures").iterdir()}
    assert 0 == main(words)
    out, err = capfd.readouterr()
    assert "" == err
    assert "After the same time" in out
    assert f"report: {Path('runs/compare-small/report.html')}" in out


def test_an_interrupted_comparison_goes_on_to_the_same_figures(job: dict[str, Any]) -> None:
    methods = {"FedEL, beta 0.3": FedEL(beta=0.3), "FedEL, beta 0.9": {"name": "fedel", "beta": 0.9}}
    count = 0

    def impatient(_: Any) -> None:
        nonlocal count
        count += 1
        if count == ROUNDS + 1:
            raise KeyboardInterrupt

    objects = {"model": net(), "data": tiny.data()}
    whole = fedel.compare(job, methods, seeds=1, out="whole", **objects, **QUIET)
    with pytest.raises(fedel.Stopped, match="1 of 2 runs in cut are done: continue with the same call"):
        fedel.compare(job, methods, 1, out="cut", **objects, executor="serial", progress=impatient)
    again = fedel.compare(job, methods, 1, out="cut", model=net(), data=tiny.data(), **QUIET)
    assert whole.methods == again.methods
    assert list(methods) == list(again.results)
    assert {0.3, 0.9} == {found[0].stored.settings["strategy"]["beta"] for found in again.results.values()}
    assert [*methods] == list(dict.fromkeys(again.frame()["method"]))
    assert "FedEL, beta 0.3" in repr(again)
    assert "<table>" in again._repr_html_()
    assert again.figure()._repr_svg_().startswith("<svg")
    assert again.figure("loss").save("loss.png").stat().st_size > 1000
    assert not again.results["FedEL, beta 0.3"][0].model().training
    other = fedel.compare(job, ["fedel"], 1, out="cut", model=net(8), data=objects["data"], **QUIET)
    assert 3 == len(list(Path("cut/runs").iterdir()))
    assert "One seed says nothing" in other.sentences[-1]
    with pytest.raises(ConfigError, match="no figure 'los'; did you mean 'loss'"):
        other.figure("los")
    with pytest.raises(ConfigError, match=r"loss\.gif: a figure is saved as pdf, png, svg"):
        other.figure("loss").save("loss.gif")


def test_a_method_that_fails_is_reported_and_the_others_are_compared(job: dict[str, Any]) -> None:
    @dataclass(frozen=True)
    class Broken(FedAvg):
        name = "broken"

        def fit(self, *_: Any) -> Any:
            raise ModelError("this model cannot be narrowed")

    whole = {**job, "workload": WORKLOAD}
    found = fedel.compare(whole, ["fedavg", Broken()], seeds=1, **QUIET)
    assert ["FedAvg"] == list(found.results)
    assert "narrowed" in next(iter(found.failed.values()))
    assert "narrowed" in found.report().read_text()
    with pytest.raises(ServiceError, match="no seed is done with every method: this model cannot be narrowed"):
        fedel.compare(whole, [Broken()], seeds=1, out="alone", **QUIET)


@pytest.mark.parametrize(
    ("methods", "seeds", "said"),
    [
        ([], 1, "at least one"),
        ("fedel", 1, "as a list"),
        (["fedel", {"name": "fedel", "beta": 0.1}], 1, "two are called 'fedel'; give each a label"),
        (["fedel"], 0, "seeds = 0"),
        (["fedell"], 1, "did you mean 'fedel'"),
    ],
)
def test_what_cannot_be_compared_is_refused(job: dict[str, Any], methods: Any, seeds: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fedel.compare({**job, "workload": WORKLOAD}, methods, seeds, **QUIET)


def test_options_that_do_not_fit_are_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--format", "pdf"], "--figures"),
        (["--figures", "--format", "pdf,gif"], "gif is not one of"),
    ):
        assert 2 == main(["compare", "none.toml", "--methods", "fedel", *words])
        assert said in capsys.readouterr().err
