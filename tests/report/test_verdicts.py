"""The sentences of a report hold for the whole curves; a run that did not learn gets no praise."""

import pytest

from fedel.report.verdicts import verdicts
from tests.report.made import write_run

RISING = [0.1, 0.3, 0.5, 0.6, 0.7, 0.7, 0.7, 0.7]


def test_the_first_sentence_compares_after_the_same_time(tmp_path):
    fast = write_run(tmp_path / "fast", "fedel", 1.0, RISING)
    slow = write_run(tmp_path / "slow", "fedavg", 4.0, [0.2, 0.6, 0.6, 0.7, 0.7, 0.7, 0.7])
    sentences = verdicts([fast, slow])
    assert "After the same time (8 s): FedEL 70.0 %, FedAvg 50.0 %." == sentences[0]
    assert "A round of FedEL takes 1 s. A round of FedAvg takes 4 s, 4.00 times as long." == sentences[1]
    assert (
        "Both get to 70.0 % and hold it for 3 tests: FedEL after 5 s, FedAvg after 16 s, "
        "a speed-up of 3.20." == sentences[2]
    )


def test_a_spike_is_no_target(tmp_path):
    """The highest single test of the first run is never held."""
    spiky = write_run(tmp_path / "spiky", "fedel", 1.0, [0.3, 0.9, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3])
    steady = write_run(tmp_path / "steady", "fedavg", 1.0, [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    (target,) = [sentence for sentence in verdicts([spiky, steady]) if "Both get to" in sentence]
    assert "Both get to 30.0 %" in target


def test_a_run_at_chance_has_not_learned_and_has_no_speed_up(tmp_path):
    tests = [0.1, 0.1, 0.1, 0.1, 0.198, 0.1, 0.1, 0.1, 0.1, 0.1]
    guessing = write_run(tmp_path / "guessing", "fedel", 0.4, tests, num_classes=10)
    learning = write_run(tmp_path / "learning", "fedavg", 1.4, RISING, num_classes=10)
    sentences = verdicts([guessing, learning])
    assert "After the same time (4 s): FedEL 10.0 %, FedAvg 40.0 %." == sentences[0]
    assert "FedEL has not learned: 10.0 % is chance for 10 classes." == sentences[1]
    assert not any("speed-up" in sentence or "times as long" in sentence for sentence in sentences)


def test_a_run_that_collapses_has_lost_what_it_learned(tmp_path):
    run = write_run(tmp_path / "x", "fedel", 1.0, [0.6, 0.6, 0.6, 0.6, *[0.1] * 4], num_classes=10)
    said = "FedEL has lost what it learned (60.0 % at its best): 10.0 % is chance for 10 classes."
    assert said in verdicts([run])


@pytest.mark.parametrize("num_classes", [0, 1000])
def test_nothing_is_called_chance_without_a_reason(num_classes, tmp_path):
    """Where the classes are not known, and where there are more."""
    run = write_run(tmp_path / "x", "fedel", 1.0, [0.1], num_classes=num_classes)
    assert ["FedEL: 10.0 % after 1 round, 1 s."] == verdicts([run])


def test_virtual_seconds_are_called_so_with_their_scope(tmp_path):
    words = {
        "backward": "virtual, backward passes only",
        "train": "virtual, whole steps",
        "round": "virtual, whole rounds",
    }
    for scope, said in words.items():
        run = write_run(tmp_path / scope, "fedel", 1.0, [0.5], virtual=True, scope=scope)
        assert [f"FedEL: 50.0 % after 1 round, 1 s {said}."] == verdicts([run])
    network = "[network]\nup_mbps = 5.0\n"
    run = write_run(tmp_path / "x", "fedel", 1.0, [0.5], virtual=True, scope="backward", settings=network)
    assert "1 s virtual, backward passes and transfers." in verdicts([run])[0]


def test_different_clocks_are_not_compared(tmp_path):
    simulated = write_run(tmp_path / "a", "fedel", 1.0, RISING, virtual=True, scope="backward")
    real = write_run(tmp_path / "b", "fedavg", 4.0, RISING)
    sentences = verdicts([simulated, real])
    assert "cannot be compared (FedEL: virtual, backward passes only; FedAvg: measured)" in sentences[-1]
    assert not any("same time" in s or "times as long" in s or "speed-up" in s for s in sentences)


def test_a_run_that_diverges_says_why(tmp_path):
    why = "the report of client '{}': loss is nan, which is not a number: training diverged, try a lower lr"
    refused = {name: why.format(name) for name in ("one", "two")}
    run = write_run(
        tmp_path / "x",
        accuracies=[0.1] * 3,
        of_round=lambda _: {"clients": (), "num_updates": 0, "loss": None, "refused": refused},
    )
    assert (
        "FedEL: no update counted in any round. Most often: loss is nan, which is not a number: training "
        "diverged, try a lower lr." in verdicts([run])
    )


def test_runs_without_rounds_say_so(tmp_path):
    empty, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", "fedavg", 1.0, RISING)
    assert ["FedEL: no round is closed."] == verdicts([empty])
    assert verdicts([empty, other])[0].startswith("FedEL: no round is closed. FedAvg: 70.0 %")


def test_two_runs_of_one_method_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / name, "fedel", 1.0, RISING) for name in ("one", "two")]
    assert "FedEL (one) 70.0 %, FedEL (two) 70.0 %" in verdicts(runs)[0]
