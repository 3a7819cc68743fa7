"""The model of a run in use: your own module, an early exit, the normalisation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from fedel.data import from_arrays
from fedel.data.model_input import FILE
from fedel.errors import ConfigError, ModelError
from fedel.models import as_block_model, deploy
from fedel.report import runs
from tests.models.runs import EXAMPLES, HERE, Copied, Net, pictures, simulated


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of examples/own.py, with the model of each round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        rounds = {"num_rounds": 3, "keep_every": 1}
        yield simulated(tmp_path_factory.mktemp("runs") / "own", "own:model", "own:data", rounds=rounds)


@pytest.fixture(scope="module")
def bytes_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("runs") / "bytes", f"{HERE}:Net", f"{HERE}:pictures")


@pytest.fixture
def copied(bytes_run: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(bytes_run, tmp_path / "copied"))


def of_fedel(run: Path, module: nn.Module, x: torch.Tensor, file: str) -> list[torch.Tensor]:
    """Logits of each exit, from FedEL's own network."""
    network = as_block_model(module, x)
    network.load(load_file(run / file))
    with torch.no_grad():
        return network.eval().all_exits(x)


def test_a_plain_module_takes_the_tensors_and_answers_as_the_run_did(own: Path) -> None:
    import own as users

    *_, x, y = users.data()
    x = torch.from_numpy(x)
    expected = of_fedel(own, users.model(), x, "best.safetensors")[-1]
    plain = users.model()
    plain.load_state_dict(deploy.load(own).state_dict())
    with torch.no_grad():
        assert torch.equal(expected, plain.eval()(x))
    module = deploy.trained(own)
    assert isinstance(module, nn.Sequential)
    assert not module.training
    assert not module(x).requires_grad
    assert torch.equal(expected, module(x))
    result = runs.load(own).result
    assert result is not None
    assert result.best_accuracy == pytest.approx((module(x).argmax(1).numpy() == y).mean())


def test_every_exit_is_a_smaller_model(own: Path) -> None:
    import own as users

    x = torch.from_numpy(users.data()[2][:5])
    expected = of_fedel(own, users.model(), x, "model.safetensors")
    sizes = []
    for exit, logits in enumerate(expected, start=1):
        module = deploy.trained(own, exit, "last")
        assert torch.equal(logits, module(x))
        sizes.append(sum(p.numel() for name, p in module.named_parameters() if not name.startswith("heads.")))
    assert 5 == len(sizes) == len(set(sizes))
    assert sorted(sizes) == sizes


def test_an_early_exit_has_the_users_names_and_its_head(own: Path) -> None:
    model = deploy.load(own)
    tensors = model.state_dict(2)
    assert ["0.weight", "0.bias", "2.weight", "2.bias"] == list(tensors)[:4]
    assert ["exit_head.linear.weight", "exit_head.linear.bias"] == list(tensors)[4:]
    assert "AdaptiveAvgPool2d(output_size=(5, 5))" in model.head(2)
    assert "" == model.head()


def test_rounds(own: Path) -> None:
    numbers = {round: deploy.load(own, round).round for round in ("best", "last", 1, "2")}
    best = deploy.best_of(runs.load(own).rounds)
    assert best is not None
    assert {"best": best.round + 1, "last": 3, 1: 1, "2": 2} == numbers
    first, second = (deploy.load(own, number).state_dict()["0.weight"] for number in (1, 2))
    assert torch.equal(
        first, torch.from_numpy(load_file(own / "model-1.safetensors")["blocks.block1.0.weight"])
    )
    assert not torch.equal(first, second)


def test_statistics_and_layers_in_no_block_load_strictly(bytes_run: Path) -> None:
    tensors = deploy.load(bytes_run).state_dict()
    net = Net(3)
    net.load_state_dict(tensors)
    assert "body.0.norm.num_batches_tracked" in tensors
    assert "unused.weight" in tensors
    assert "unused.weight" not in deploy.load(bytes_run).state_dict(2)
    assert "body.0.norm.num_batches_tracked" in deploy.load(bytes_run).state_dict(2)


def test_normalisation_takes_bytes_as_floats(bytes_run: Path) -> None:
    data = from_arrays("pictures", *pictures())
    stored = torch.from_numpy(data.test.x).float()
    (normalised, _), *_ = data.test_batches(len(data.test))
    for exit in (None, 2):
        expected = deploy.trained(bytes_run, exit)(torch.from_numpy(normalised))
        got = deploy.trained(bytes_run, exit, normalise=True)(stored)
        assert torch.equal(expected, got)
    assert not torch.allclose(deploy.trained(bytes_run)(stored), expected)


def test_the_data_is_not_needed(copied: Path) -> None:
    text = (copied / "config.toml").read_text(encoding="utf-8")
    (copied / "config.toml").write_text(text.replace(f"{HERE}:pictures", "nowhere:data"), encoding="utf-8")
    x = torch.rand(2, 3, 9, 9)
    expected = deploy.trained(copied)(x)
    (copied / FILE).unlink()  # a run of an older version
    with pytest.raises(Exception, match="nowhere"):
        deploy.trained(copied)
    given = deploy.load(copied, data=from_arrays("pictures", *pictures()))
    assert given.takes.normalisation is not None
    assert torch.equal(expected, given.module()(x))


def test_objects_instead_of_names(bytes_run: Path) -> None:
    x, mine = torch.rand(2, 3, 9, 9), Net(3)
    before = mine.entry.weight.clone()
    expected = deploy.trained(bytes_run)(x)
    assert torch.equal(expected, deploy.trained(bytes_run, model=mine)(x))
    assert torch.equal(before, mine.entry.weight)
    assert torch.equal(expected, deploy.trained(bytes_run, model=lambda: Net(3))(x))


def test_blocks_that_are_copies_are_what_answers(bytes_run: Path) -> None:
    x = torch.rand(2, 3, 9, 9)
    model = deploy.load(bytes_run, model=lambda: Copied(3))
    torch.testing.assert_close(deploy.trained(bytes_run)(x), model.module()(x))
    assert "blocks.entry.weight" in model.state_dict()


def test_a_method_that_tests_the_mean_over_exits(tmp_path: Path) -> None:
    run = simulated(tmp_path / "depth", "cnn", f"{HERE}:pictures", strategy={"name": "depthfl"})
    model = deploy.load(run)
    data = from_arrays("pictures", *pictures())
    (x, y), *_ = data.test_batches(len(data.test))
    record = runs.load(run).rounds[model.round - 1]
    correct = model.module()(torch.from_numpy(x)).argmax(1).numpy() == y
    assert record.accuracy == pytest.approx(correct.mean())
    assert correct.tolist() != (model.module(7)(torch.from_numpy(x)).argmax(1).numpy() == y).tolist()
    with pytest.raises(
        ModelError, match="DepthFL tests the mean over the exits 2, 4, 7, which no single network"
    ):
        model.state_dict()
    assert "blocks.classifier.linear.weight" in model.state_dict(7)


def test_a_built_in_model_has_only_what_the_exit_needs(tmp_path: Path) -> None:
    options = {"model": "cnn", "data": f"{HERE}:pictures", "model_options": {"width": 0.25}}
    run = simulated(tmp_path / "cnn", "", "", num_rounds=1, workload=options)
    tensors = deploy.load(run).state_dict()
    assert "blocks.classifier.linear.weight" in tensors
    assert not [name for name in tensors if name.startswith("exits.")]
    early = deploy.load(run).state_dict(2)
    assert {"blocks.conv1_1", "blocks.conv1_2", "exits.conv1_2"} == {
        ".".join(name.split(".")[:2]) for name in early
    }


@pytest.mark.parametrize("exit", [0, 6, -1])
def test_an_exit_that_is_not_there(own: Path, exit: int) -> None:
    with pytest.raises(ModelError, match=f"no exit {exit}; .* exits 1 to 5, one after each block .block1, "):
        deploy.trained(own, exit)


@pytest.mark.parametrize(
    ("round", "said"),
    [
        ("worst", "write best, last or the number"),
        (9, "round 9 .*keep_every.*; choose one of the rounds"),
        (0, "--round 0: write best"),
    ],
)
def test_a_round_that_is_not_there(bytes_run: Path, round: str | int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        deploy.load(bytes_run, round)


def test_a_run_that_is_not_over(copied: Path) -> None:
    (copied / "result.json").unlink()
    assert deploy.load(copied, "best")
    with pytest.raises(ConfigError, match=r"so it has no last model; continue it .*choose one of the rounds"):
        deploy.load(copied, "last")
    (copied / "best.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no model: the run is not over; continue it"):
        deploy.load(copied)


def test_a_run_without_a_test_has_no_best(tmp_path: Path) -> None:
    run = simulated(
        tmp_path / "blind", f"{HERE}:Net", f"{HERE}:pictures", rounds={"num_rounds": 1, "evaluate_every": 0}
    )
    with pytest.raises(ConfigError, match=r"no round was tested, .* choose one of the rounds 1 "):
        deploy.load(run)
    assert 1 == deploy.load(run, "last").round


def test_directories_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run directory"):
        deploy.load(tmp_path / "missing")
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        deploy.load(tmp_path)
    (tmp_path / "rounds.jsonl").touch()
    with pytest.raises(ConfigError, match=r"config\.toml is missing"):
        deploy.load(tmp_path)


def test_a_damaged_file(copied: Path) -> None:
    (copied / "best.safetensors").unlink()
    (copied / "best.safetensors").write_bytes(b"nothing")
    (copied / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"best\.safetensors: cannot be read"):
        deploy.load(copied)
