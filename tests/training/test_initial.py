"""A run that starts from a file of weights, and who reads that file."""

from __future__ import annotations

import json
import logging
import pathlib
from dataclasses import replace

import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from fedel import plugins
from fedel.cli.job_options import model_file
from fedel.errors import ConfigError
from fedel.job import RunConfig
from fedel.models import build
from fedel.training import factory
from fedel.training.initial import origin_of
from fedel.training.settings import TrainerSettings
from tests.simulation import tiny
from tests.strategies.fakes import same_bits

OWN = {"model": "tests.simulation.tiny:model", "data": "tests.simulation.tiny:data"}
TOYS = {"model": "tests.training.toys:make_model", "data": "tests.training.toys:make_data"}


def job(file: object = "", seed: int = 0, **workload: object) -> RunConfig:
    return RunConfig.parse({"seed": seed, "workload": {**OWN, "initial": str(file), **workload}})


def net(seed: int = 5) -> torch.nn.Sequential:
    """The user's own network, trained elsewhere: nothing in it is as a seed of FedEL has it."""
    torch.manual_seed(seed)
    made = tiny.model()
    made[1][1].running_mean.fill_(0.5)
    return made.eval()


@pytest.mark.parametrize("ending", [".safetensors", ".pt", ".pth"])
def test_the_state_dict_of_your_own_network(tmp_path, ending):
    file, own, x = tmp_path / f"net{ending}", net(), torch.randn(4, 1, 6, 6)
    if ending == ".safetensors":
        save_file(own.state_dict(), file)
    else:
        torch.save(own.state_dict(), file)
    _, first = factory.initial_model(job(file))
    model = build(OWN["model"], sample_input=x, num_classes=tiny.NUM_CLASSES)
    model.load(first)
    with torch.no_grad():
        assert torch.equal(own(x), model.eval()(x))
    # Exits are FedEL's and follow from the seed.
    _, fresh = factory.initial_model(job())
    exits = [name for name in first if name.startswith("exits.")]
    assert exits
    assert same_bits({n: first[n] for n in exits}, {n: fresh[n] for n in exits})


def test_half_precision_becomes_float32(tmp_path):
    state = {name: value.bfloat16() for name, value in net().state_dict().items() if value.is_floating_point()}
    save_file(state, tmp_path / "half.safetensors")
    _, first = factory.initial_model(job(tmp_path / "half.safetensors"))
    assert {"float32"} == {str(values.dtype) for values in first.values()}
    assert torch.equal(torch.from_numpy(first["blocks.block1.0.weight"]), state["0.0.weight"].float())


def test_a_model_of_fedel_is_taken_whole(tmp_path):
    _, other = factory.initial_model(job(seed=3))
    save_arrays(other, tmp_path / "model.safetensors")
    assert same_bits(other, factory.initial_model(job(tmp_path / "model.safetensors", seed=4))[1])
    assert not same_bits(other, factory.initial_model(job(seed=4))[1])


def another_classifier(tmp_path: pathlib.Path) -> pathlib.Path:
    state = net().state_dict()
    state["3.1.weight"], state["3.1.bias"] = torch.zeros(1000, 54), torch.zeros(1000)
    del state["2.0.bias"]
    state["head.weight"] = torch.zeros(3)
    save_file(state, tmp_path / "backbone.safetensors")
    return tmp_path / "backbone.safetensors"


def test_what_does_not_fit_is_named(tmp_path):
    with pytest.raises(ConfigError) as error:
        factory.initial_model(job(another_classifier(tmp_path)))
    said = str(error.value)
    assert "it lacks 2.0.bias" in said
    assert "3.1.weight ((1000, 54) in the file, (3, 54) in the model)" in said
    assert "the model has no head.weight" in said
    assert "initial_strict = false" in said


def test_a_new_classifier_on_a_pretrained_network(tmp_path, caplog):
    file = another_classifier(tmp_path)
    with caplog.at_level(logging.INFO):
        _, first = factory.initial_model(job(file, initial_strict=False))
    _, fresh = factory.initial_model(job())
    assert same_bits({"w": net()[0][0].weight.detach().numpy()}, {"w": first["blocks.block1.0.weight"]})
    for name in ("blocks.block4.1.weight", "blocks.block3.0.bias"):
        assert same_bits({name: fresh[name]}, {name: first[name]})
        assert name in caplog.text
    assert "no place for: head.weight" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.safetensors", None, "cannot be read: No such file"),
        ("net.txt", b"", "reads .safetensors, .pt, .pth"),
        ("net.safetensors", b"no tensors", "holds no tensors that FedEL can read"),
        ("net.pt", b"no tensors", "holds no tensors that FedEL can read"),
    ],
)
def test_files_that_are_none(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        factory.initial_model(job(tmp_path / name))


def test_weights_that_are_no_good(tmp_path):
    torch.save(net(), tmp_path / "whole.pt")  # the module itself: a pickle of code
    with pytest.raises(ConfigError, match=r"whole\.pt holds no tensors that FedEL can read"):
        factory.initial_model(job(tmp_path / "whole.pt"))
    torch.save({"net": net().state_dict()}, tmp_path / "nested.pt")
    with pytest.raises(ConfigError, match=r"is not a state dict.*net\.state_dict\(\) alone"):
        factory.initial_model(job(tmp_path / "nested.pt"))
    save_file({"other": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="none of its 1 tensors belongs to model"):
        factory.initial_model(job(tmp_path / "other.safetensors", initial_strict=False))
    state = net().state_dict()
    state["0.0.bias"][0] = torch.nan
    save_file(state, tmp_path / "nan.safetensors")
    with pytest.raises(ConfigError, match=r"0\.0\.bias holds NaN or Inf"):
        factory.initial_model(job(tmp_path / "nan.safetensors"))


def test_no_device_reads_the_file(tmp_path, monkeypatch):
    """Whatever a job says that came over the wire."""
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"not for jobs")
    opened = []
    read = pathlib.Path.read_bytes
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda self: opened.append(self) or read(self))
    hostile = RunConfig.parse({"workload": {**TOYS, "initial": str(secret)}, "work": {"batch_size": 4}})
    _, tester, _ = factory.make_trainer(hostile, TrainerSettings(evaluate=True, threads=1))
    assert isinstance(tester, factory.ModelTest)
    tester.beside_training()
    assert secret not in opened
    with pytest.raises(ConfigError, match="holds no tensors"):  # here it would have been seen
        factory.initial_model(hostile)
    assert secret in opened
    with plugins.only(plugins.Allowed()), pytest.raises(ConfigError, match="below this machine's working"):
        origin_of(hostile.workload)


def test_the_name_of_the_file_is_not_sent(tmp_path):
    made = job(tmp_path / "mine.safetensors", initial_strict=False)
    assert "mine" not in json.dumps(made.table_to_send())
    assert RunConfig.parse(made.table_to_send()) == replace(made, workload=job().workload)


def test_models_of_a_run_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "night"
    folder.mkdir(parents=True)
    for name in ("best", "model", "model-5"):
        (folder / f"{name}.safetensors").touch()
    runs = pathlib.Path("runs")
    assert "best.safetensors" == model_file("night", runs).name
    assert "best.safetensors" == model_file("night@best", runs).name
    assert "model.safetensors" == model_file("runs/night@last", runs).name
    assert "model-5.safetensors" == model_file(f"{folder}@5", runs).name
    for text in ("night@6", "night@worst", "night@"):
        with pytest.raises(ConfigError, match="it has: @best, @last, @5"):
            model_file(text, runs)
    for text in ("day@best", "@best"):
        with pytest.raises(ConfigError, match="there is no run"):
            model_file(text, runs)
