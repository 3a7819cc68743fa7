import json
import shutil

import pytest

from fedel.errors import ConfigError
from fedel.simulation.store import RunFolder
from tests.simulation.fakes import play, run_config
from tests.strategies.fakes import fleet, same_bits

STRATEGIES = (
    "fedel",
    "pyramidfl",
    "timelyfl",
    {"name": "fedel", "variant": "no-rollback", "hold_rounds": 2},
    {"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": 6},
)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("stop_after", [0, 1, 4])
def test_a_stopped_run_ends_like_one_that_was_not_stopped(strategy, stop_after, tmp_path):
    run = run_config(strategy, num_rounds=6, num_participants=4)
    whole = play(run, fleet(6))
    play(run, fleet(6), folder=tmp_path / "run", stop_after=stop_after)
    resumed = play(run, fleet(6), folder=tmp_path / "run")
    assert same_bits(whole.model, resumed.model)
    assert whole.comparable() == resumed.comparable()
    assert whole.checkpoint.handover == resumed.checkpoint.handover
    assert whole.checkpoint.held == resumed.checkpoint.held


def test_a_crash_between_the_model_and_the_state_costs_one_round(tmp_path):
    """Everything of round 3 is written except the file that says that it is over."""
    run = run_config({"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": 6}, num_rounds=6)
    play(run, fleet(6), folder=tmp_path / "run", stop_after=3)
    shutil.copytree(tmp_path / "run", tmp_path / "later")
    play(run, fleet(6), folder=tmp_path / "later", stop_after=4)
    for file in (tmp_path / "later" / "state").glob("*.safetensors"):
        if not (tmp_path / "run" / "state" / file.name).exists():
            shutil.copy(file, tmp_path / "run" / "state")
    line = (tmp_path / "later" / "rounds.jsonl").read_text().splitlines()[3]
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write(line + "\n" + line[:40])
    resumed = play(run, fleet(6), folder=tmp_path / "run")
    assert [0, 1, 2, 3, 4, 5] == [record.round for record in resumed.records]
    assert same_bits(play(run, fleet(6)).model, resumed.model)


def test_old_rounds_leave_nothing_behind(tmp_path):
    run = run_config(
        {"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": 6}, num_rounds=5, num_participants=2
    )
    play(run, fleet(6), folder=tmp_path)
    kept = {file.name for file in (tmp_path / "state").iterdir()}
    assert {"state.json", "model-5.safetensors", "fold-5.safetensors"} <= kept
    state = json.loads((tmp_path / "state" / "state.json").read_text())
    assert 3 + len(state["with_tensors"]) == len(kept)


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path):
    folder, settings = RunFolder(tmp_path), run_config().table()
    folder.check(settings, resume=False)
    folder.open(settings)
    with pytest.raises(ConfigError, match="--resume"):
        folder.check(settings, resume=False)


def test_a_run_goes_on_only_with_another_number_of_rounds(tmp_path):
    folder = RunFolder(tmp_path)
    folder.open(run_config(num_rounds=5).table())
    folder.check(run_config(num_rounds=9).table(), resume=True)
    with pytest.raises(ConfigError, match=r"seed = 2, the run was started with 1"):
        folder.check(run_config(seed=2).table(), resume=True)
    with pytest.raises(ConfigError, match=r"strategy\.beta = 0\.5"):
        folder.check(run_config({"name": "fedel", "beta": 0.5}).table(), resume=True)


def test_a_model_is_kept_under_its_own_name(tmp_path):
    play(run_config(num_rounds=2), fleet(3), folder=tmp_path)
    RunFolder(tmp_path).keep("best.safetensors", 2)
    newest = (tmp_path / "state" / "model-2.safetensors").read_bytes()
    assert newest == (tmp_path / "best.safetensors").read_bytes()


def test_damage_is_named(tmp_path):
    play(run_config(num_rounds=2), fleet(3), folder=tmp_path, stop_after=1)
    (tmp_path / "state" / "model-1.safetensors").write_bytes(b"no model")
    with pytest.raises(ConfigError, match="is damaged"):
        play(run_config(num_rounds=2), fleet(3), folder=tmp_path)
