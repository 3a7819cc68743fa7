from dataclasses import replace

import pytest

from fedel.cli.experiment import NAMES
from fedel.errors import ConfigError
from fedel.experiments import report, scale
from fedel.experiments.plans import BEST, CUT_BEST, EXPERIMENTS, distinct, plan
from tests.experiments import fake_runs


def names(experiment, size, **options):
    return {run.label: run.name for run in plan(experiment, size, **options) if run.seed == 1}


def test_every_experiment_has_a_plan_an_analysis_and_a_name_on_the_command_line():
    assert list(NAMES) == list(EXPERIMENTS) == list(report.ANALYSES)


@pytest.mark.parametrize("name", ["ci", "small", "paper"])
def test_every_job_of_a_scale_is_a_valid_simulation(name):
    size = scale.load(name)
    runs = distinct(run for experiment in EXPERIMENTS for run in plan(experiment, size))
    assert {"cifar10", "speech", "text"} <= {run.task for run in runs}
    assert all(task.cuts for task in size.tasks.values())


def test_experiments_share_runs_that_are_equal():
    size = fake_runs.scale()
    fedel = names("table1", size)["fedel"]
    assert fedel == names("beta", size)["beta 0.6"]
    assert fedel == names("budget", size)["T_th x 1"]
    assert fedel == names("rollback", size)["rollback"]
    assert names("table1", size) == names("statistics", size)
    together = distinct([*plan("table1", size), *plan("statistics", size), *plan("window", size)])
    assert 2 * 11 == len(together)


def test_whatever_is_set_otherwise_makes_another_run():
    task = scale.Task("pictures", {**fake_runs.JOB, "work": {"num_steps": 11}})
    before, after = fake_runs.scale(), fake_runs.scale(tasks={"cifar10": task})
    assert names("table1", before).keys() == names("table1", after).keys()
    assert not set(names("table1", before).values()) & set(names("table1", after).values())
    assert 7 == len(set(names("beta", before).values()))
    seeds = [run.name for run in plan("table1", before) if run.label == "fedavg"]
    assert 2 == len(set(seeds))


def test_a_key_that_jobs_did_not_have_yet_changes_no_name():
    run = next(run for run in plan("table1", fake_runs.scale()) if run.label == "fedel")
    without = {**run.table, "strategy": dict(run.table["strategy"]), "work": dict(run.table["work"])}
    del without["work"]["weight_decay"], without["strategy"]["weighting"], without["network"]
    assert run.name == replace(run, table=without).name
    other = {**without, "work": {**without["work"], "weight_decay": 0.25}}
    assert run.name != replace(run, table=other).name


def test_the_name_is_for_the_eye_too():
    name = names("composition", fake_runs.scale())["fedprox-fedel"]
    assert name.startswith("cifar10-fedprox-fedel-1-")


def test_options_of_a_method_hold_wherever_it_is_used():
    size = fake_runs.scale(methods={"fedel": {"weighting": "samples"}})
    wrapped = next(run for run in plan("composition", size) if run.label == "fednova-fedel")
    assert "samples" == wrapped.table["strategy"]["base"]["weighting"]


def test_an_experiment_can_change_the_job_and_the_seeds():
    settings = {"composition": scale.Setting(seeds=1, job={"work": {"num_steps": 0, "num_epochs": 3}})}
    runs = plan("composition", fake_runs.scale(experiments=settings))
    assert {(1, 0, 3)} == {(r.seed, r.table["work"]["num_steps"], r.table["work"]["num_epochs"]) for r in runs}


def test_seeds_and_tasks_can_be_asked_for():
    assert {1, 2, 3, 4} == {run.seed for run in plan("window", fake_runs.scale(), seeds=4)}
    assert [1, 1, 1, 2, 2, 2] == [run.seed for run in plan("window", fake_runs.scale())]
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        plan("window", fake_runs.scale(), tasks=["cifar"])
    with pytest.raises(ConfigError, match="did you mean 'table1'"):
        plan("table", fake_runs.scale())


def test_single_variants_can_have_more_seeds():
    setting = scale.Setting(seeds=1, more={"cifar10": {"fedel-c": 3}})
    runs = plan("window", fake_runs.scale(experiments={"window": setting}))
    assert [("fedavg", 1), ("fedel", 1), ("fedel-c", 1), ("fedel-c", 2), ("fedel-c", 3)] == [
        (run.label, run.seed) for run in runs
    ]
    with pytest.raises(ValueError, match="unknown task 'cifar'"):
        fake_runs.scale(experiments={"window": scale.Setting(more={"cifar": {"fedel": 3}})})


def test_an_unknown_scale_or_a_wrong_key_is_named(tmp_path):
    with pytest.raises(ConfigError, match="ci, paper, small"):
        scale.load("smal")
    wrong = tmp_path / "own.toml"
    wrong.write_text('note = ""\n[tasks.a]\ntitle = ""\nsedes = 2\n[tasks.a.job]\n')
    with pytest.raises(ConfigError, match=r"own.toml.*did you mean 'seeds'"):
        scale.load(str(wrong))


def test_methods_with_short_rounds_get_more_of_them_and_the_learning_rate_falls_as_far():
    job = scale.overlaid(fake_runs.JOB, {"rounds": {"lr_decay": 0.9}})
    tasks, settings = {"cifar10": scale.Task("pictures", job)}, {"headline": scale.Setting(longer=2)}
    runs = {run.label: run for run in plan("headline", fake_runs.scale(tasks=tasks, experiments=settings))}
    rounds = {label: run.table["rounds"] for label, run in runs.items()}
    assert {"fedavg"} == {label for label, found in rounds.items() if found["num_rounds"] == 4}
    assert {8} == {found["num_rounds"] for label, found in rounds.items() if label != "fedavg"}
    assert rounds["fedel"]["lr_decay"] ** 8 == pytest.approx(0.9**4)


PRESET = {
    "spread": {"strategy": {"start": "spread"}},
    "exits": {"workload": {"model_options": {"width": 0.5}}, "strategy": {"beta": 0.4}},
}


def test_the_preset_is_all_its_parts_and_the_ablation_leaves_each_out():
    tried = {"damping": {"strategy": {"damping": 0.5}}}
    size = fake_runs.scale(preset=PRESET, tried=tried, methods={"fedel": {"weighting": "samples"}})
    runs = {run.label: run.table for run in plan("ablation", size)}
    assert ["fedavg", "fedel", BEST, "without spread", "without exits", "with damping"] == list(runs)

    def parts(label):
        table = runs[label]
        return table["strategy"]["start"], table["strategy"]["beta"], table["workload"]["model_options"]

    assert ("first", 0.6, {}) == parts("fedel")
    assert ("spread", 0.4, {"width": 0.5}) == parts(BEST)
    assert ("first", 0.4, {"width": 0.5}) == parts("without spread")
    assert ("spread", 0.6, {}) == parts("without exits")
    assert parts(BEST) == parts("with damping")
    assert (0.0, 0.5) == tuple(runs[label]["strategy"]["damping"] for label in (BEST, "with damping"))
    assert "samples" == runs[BEST]["strategy"]["weighting"]
    (again,) = [run.name for run in plan("headline", size) if run.label == BEST and run.seed == 1]
    assert again == names("ablation", size)[BEST]


FOR_OTHERS = {"average": {"server": {"average": 0.5}}, "answer": {"strategy": {"answer": 0.5}}}


def test_what_is_tried_replaces_the_preset_s_own_value():
    size = fake_runs.scale(preset=FOR_OTHERS, tried={"all-exits": {"strategy": {"answer": 1.0}}})
    runs = {run.label: run.table["strategy"] for run in plan("ablation", size)}
    assert (0.5, 1.0) == (runs[BEST]["answer"], runs["with all-exits"]["answer"])


def test_what_others_can_have_of_the_preset_is_tried_for_them_too():
    runs = {run.label: run.table for run in plan("ablation", fake_runs.scale(preset={**PRESET, **FOR_OTHERS}))}
    averaged = [label for label, table in runs.items() if table["server"]["average"] == 0.5]
    ours = ["without spread", "without exits", "without answer"]
    assert [BEST, "fedavg with average", "fedavg-cut with average", *ours] == averaged
    answering = [label for label, table in runs.items() if table["strategy"].get("answer") == 0.5]
    assert [BEST, "fedavg-cut with answer", "without spread", "without exits", "without average"] == answering


def test_the_plain_rival_gets_all_of_the_preset_that_it_can_have():
    runs = {run.label: run.table for run in plan("headline", fake_runs.scale(preset={**PRESET, **FOR_OTHERS}))}
    rival = runs[CUT_BEST]
    assert ("fedavg-cut", 0.5) == (rival["strategy"]["name"], rival["strategy"]["answer"])
    assert (0.5, {}) == (rival["server"]["average"], rival["workload"]["model_options"])
    assert (0.0, 0.0) == (runs["fedavg-cut"]["strategy"]["answer"], runs["fedavg-cut"]["server"]["average"])


def test_a_task_can_do_without_a_part_of_the_preset():
    tasks = {"mail": scale.Task("texts", fake_runs.JOB, preset_without=("spread",))}
    size = fake_runs.scale(tasks=tasks, preset=PRESET)
    runs = {run.label: run.table["strategy"] for run in plan("ablation", size)}
    assert ("first", 0.4) == (runs[BEST]["start"], runs[BEST]["beta"])
    assert ["without exits"] == [label for label in runs if label.startswith("without")]
    with pytest.raises(ValueError, match=r"tasks\.mail\.preset_without.*'sprad'.*did you mean 'spread'"):
        fake_runs.scale(tasks={"mail": replace(tasks["mail"], preset_without=("sprad",))}, preset=PRESET)


def test_fedel_and_elastictrainer_are_given_the_same_options():
    """What only one of two methods may do is not a property of the methods."""
    for name in ("ci", "small", "paper"):
        methods = scale.load(name).methods
        shared = ("weighting", "train_all_that_fits", "probe_in_budget", "dp", "steps")
        fedel, other = (methods.get(method, {}) for method in ("fedel", "elastictrainer"))
        assert [fedel.get(key) for key in shared] == [other.get(key) for key in shared], name
