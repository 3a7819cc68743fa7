import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from fedel.errors import ConfigError
from fedel.roles.planner import Handover
from fedel.simulation.store import Checkpoint, RunFolder, alone
from fedel.types import UploadSettings
from tests.simulation.fakes import play, run_config
from tests.strategies import fakes
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
    assert same_bits(whole.checkpoint.held, resumed.checkpoint.held)


@pytest.mark.parametrize("strategy", STRATEGIES[::4], ids=str)
def test_residuals_are_kept_in_the_directory(strategy, tmp_path):
    run = replace(run_config(strategy, num_participants=4), upload=UploadSettings("topk"))
    play(run, fleet(6), folder=tmp_path / "run", stop_after=3)
    resumed, whole = play(run, fleet(6), folder=tmp_path / "run"), play(run, fleet(6))
    assert same_bits(whole.model, resumed.model)
    for client, memory in whole.checkpoint.memories.items():
        assert same_bits(memory.tensors, resumed.checkpoint.memories[client].tensors)


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


def test_a_run_of_an_earlier_release_goes_on(tmp_path):
    """It noted one version per client, of the whole model."""
    run = run_config("fedel", num_rounds=4)
    play(run, fleet(3), folder=tmp_path, stop_after=2)
    file = tmp_path / "state" / "state.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps({**state, "held": dict.fromkeys(state["held"], 1)}))
    resumed = play(run, fleet(3), folder=tmp_path)
    whole = play(run, fleet(3))
    assert same_bits(whole.model, resumed.model)
    for record, other in zip(resumed.records, whole.records, strict=True):
        assert all(a.bytes_down <= b.bytes_down for a, b in zip(record.clients, other.clients, strict=True))


def test_what_a_thousand_clients_hold_takes_little_room(tmp_path):
    spec = fakes.spec()
    many = tuple(replace(t, name=f"{t.name}.{i}") for i in range(10) for t in spec.tensors)
    names, rng = [t.name for t in many], np.random.default_rng(0)
    assert len(many) >= 200
    held = {f"client-{i}": rng.integers(0, 3000, len(names)).astype(np.int32) for i in range(1000)}
    model = {name: np.zeros(1, np.float32) for name in names}
    checkpoint = Checkpoint(model, replace(Handover(), round_num=1), held=held)
    record = play(run_config("fedavg", num_rounds=1), fleet(1)).records[0]
    folder = RunFolder(tmp_path)
    folder.open({})
    folder.commit(checkpoint, replace(record, clients=()))
    assert (tmp_path / "state" / "state.json").stat().st_size < 6 * 1000 * len(names)
    assert same_bits(held, folder.open({}).held)


def test_one_number_where_a_client_holds_all_of_one_version(tmp_path):
    play(run_config("fedavg", num_rounds=2), fleet(3), folder=tmp_path)
    state = json.loads((tmp_path / "state" / "state.json").read_text())
    assert {"client-0": 1, "client-1": 1, "client-2": 1} == state["held"]


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
    run = run_config(num_rounds=1)
    RunFolder(tmp_path).check(run.table(), resume=False)
    play(run, fleet(3), folder=tmp_path)
    with pytest.raises(ConfigError, match="--resume"):
        RunFolder(tmp_path).check(run.table(), resume=False)


def test_a_run_that_closed_no_round_does_not_block_its_name(tmp_path):
    RunFolder(tmp_path).open(run_config().table())
    RunFolder(tmp_path).check(run_config(seed=9).table(), resume=False)


def test_one_process_at_a_time(tmp_path):
    with alone(tmp_path) as first, alone(tmp_path) as second:
        assert (True, False) == (first, second)
    with alone(tmp_path) as later:
        assert later


def test_a_run_goes_on_only_with_another_number_of_rounds(tmp_path):
    folder = RunFolder(tmp_path)
    folder.open(run_config(num_rounds=5).table())
    folder.check(run_config(num_rounds=9).table(), resume=True)
    with pytest.raises(ConfigError, match=r"seed = 2, the run was started with 1"):
        folder.check(run_config(seed=2).table(), resume=True)
    with pytest.raises(ConfigError, match=r"strategy\.beta = 0\.5"):
        folder.check(run_config({"name": "fedel", "beta": 0.5}).table(), resume=True)


def test_a_setting_of_a_later_release_is_at_its_default(tmp_path):
    folder, settings = RunFolder(tmp_path), run_config().table()
    folder.open({key: table for key, table in settings.items() if key != "server"})
    folder.check(settings, resume=True)
    with pytest.raises(ConfigError, match=r"server\.average = 0\.5, the run was started with 0\.0"):
        folder.check({**settings, "server": {"average": 0.5, "momentum": 0.0}}, resume=True)


def test_an_option_of_a_method_that_came_later_is_at_its_default(tmp_path):
    folder, settings = RunFolder(tmp_path), run_config().table()
    folder.open({**settings, "strategy": {"name": "fedel"}})
    folder.check({**settings, "strategy": {"name": "fedel", "beta": 0.6}}, resume=True)
    with pytest.raises(ConfigError, match=r"strategy\.beta = 0\.5, the run was started with 0\.6"):
        folder.check({**settings, "strategy": {"name": "fedel", "beta": 0.5}}, resume=True)


def test_a_model_is_kept_under_its_own_name(tmp_path):
    played = play(run_config(num_rounds=2), fleet(3), folder=tmp_path)
    RunFolder(tmp_path).keep("best.safetensors", played.checkpoint)
    newest = (tmp_path / "state" / "model-2.safetensors").read_bytes()
    assert newest == (tmp_path / "best.safetensors").read_bytes()


def test_damage_is_named(tmp_path):
    play(run_config(num_rounds=2), fleet(3), folder=tmp_path, stop_after=1)
    (tmp_path / "state" / "model-1.safetensors").write_bytes(b"no model")
    with pytest.raises(ConfigError, match="is damaged"):
        play(run_config(num_rounds=2), fleet(3), folder=tmp_path)
