"""Networks that do not list their blocks: cut where one tensor goes on, or refused in words."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedel.errors import ModelError
from fedel.models import as_block_model, build, split
from fedel.report import runs
from fedel.simulation import start
from fedel.simulation.job import SimulationConfig
from fedel.training.factory import initial_model
from fedel.training.profile_io import save_profile
from tests.models import nets
from tests.simulation import tiny

PAGE = Path(__file__).parents[2] / "docs" / "own-model.md"
BLOCKS = {
    "resnet": "conv1 layer1_0 layer1_1 layer2_0 layer2_1 layer3_0 layer3_1 layer4_0 layer4_1 fc",
    "mobilenet": "features_0_0 features_1 features_2_expand_0 features_2_depthwise_0 features_2_se"
    " features_2_project_0 features_3 classifier_0 classifier_3",
    "vit": "patch blocks_0_attention blocks_0_mlp blocks_1_attention blocks_1_mlp blocks_2_attention"
    " blocks_2_mlp head",
    "bert": "words encoder_layers_0 encoder_layers_1 encoder_layers_2 head",
    "gru": "embed gru fc",
    "densenet": "stem dense1_convs transition dense2_convs inception fc",
    "mlp": "fc1 fc2 fc3",
}


@pytest.fixture
def made(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nets.net(request.param, 3), nets.data(request.param)[0][:6]


@pytest.mark.parametrize(("made", "blocks"), BLOCKS.items(), indirect=["made"])
def test_the_blocks_give_the_bits_of_the_network(made: tuple[nn.Module, Tensor], blocks: str) -> None:
    net, x = made
    names = dict(net.named_parameters())
    model = as_block_model(net, x[:2])
    assert blocks.split() == list(model.block_names)
    assert torch.equal(net.eval()(x), model.eval()(x)), "also for another batch size than that of the sample"
    theirs = {t.name.split(".", 2)[2]: t.name for t in model.spec.weights}
    assert theirs.keys() == names.keys(), "every parameter is in a block, under the user's own name"
    given = dict(model.named_parameters())
    assert all(given[ours] is names[name] for name, ours in theirs.items()), "and it is not a copy"


@pytest.mark.parametrize("made", BLOCKS, indirect=True)
def test_blocks_train_as_the_network_does(made: tuple[nn.Module, Tensor]) -> None:
    net, x = made
    model = as_block_model(copy.deepcopy(net), x[:2])
    grads = []
    for module in (net.train(), model.train()):
        torch.manual_seed(3)
        module(x).square().sum().backward()
        own = [(n, p.grad) for n, p in module.named_parameters() if not n.startswith("exits.")]
        grads.append({n.split(".", 2)[2] if module is model else n: grad for n, grad in own})
    for name, value in grads[0].items():
        assert torch.equal(value, grads[1][name]), f"dropout and statistics of '{name}' in training"


@pytest.mark.parametrize("kind", BLOCKS)
def test_windows_slide_over_it(kind: str, tmp_path: Path) -> None:
    job = SimulationConfig.parse(
        {
            "seed": 1,
            "workload": {
                "model": "tests.models.nets:net",
                "model_options": {"kind": kind},
                "data": "tests.models.nets:data",
                "data_options": {"kind": kind},
            },
            "rounds": {"num_rounds": 3, "num_participants": 2},
            "work": {"num_steps": 2, "batch_size": 8, "lr": 0.01},
            "partition": {"num_clients": 2, "alpha": 10, "min_size": 4},
            "fleet": {"base": str(tmp_path / "base.json")},
        }
    )
    save_profile(tiny.profile(initial_model(job.run)[0]), tmp_path / "base.json")
    with start.session(job, tmp_path / "run", executor="serial") as session:
        start.play_all(session, lambda record: None)
    windows: dict[str, set[tuple[int, int] | None]] = {}
    for record in runs.load(tmp_path / "run").rounds:
        for client in record.clients:
            windows.setdefault(client.client, set()).add(client.window)
    assert any(len(seen) > 1 for seen in windows.values()), windows


@pytest.mark.parametrize(
    ("net", "kind", "message"),
    [
        (nets.UNet(3), "unet", "the input is read again by cat\\(\\) in forward, past"),
        (
            nets.Bert(3, padding=True),
            "bert",
            r"the output of eq\(\) in forward is read again by 'encoder.layers.2'",
        ),
    ],
)
def test_a_skip_over_the_whole_network_is_named(net: nn.Module, kind: str, message: str) -> None:
    with pytest.raises(
        ModelError, match=f"nearly all of it would be one block, because {message}.*;"
    ) as refusal:
        as_block_model(net, nets.data(kind)[0][:2])
    words = str(refusal.value).partition("blocks: ")[2].partition(";")[0]
    assert words in PAGE.read_text(encoding="utf-8"), "the page quotes it"


class Whatever(nn.Module):
    """Two layers, and a forward that a test gives."""

    def __init__(self, forward: Callable[[Whatever, Tensor], object]) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.does = forward

    def forward(self, x: Tensor) -> object:
        return self.does(self, x)


def _branches(net: Whatever, x: Tensor) -> Tensor:
    x = net.one(x)
    return net.three(net.two(x) if x.sum() > 0 else x)


def _other_in_training(net: Whatever, x: Tensor) -> Tensor:
    return net.three(net.two(net.one(x)) if net.training else net.one(x))


def _shared(net: Whatever, x: Tensor) -> Tensor:
    return net.three(net.one(net.two(net.one(x))))


def _all_shared(net: Whatever, x: Tensor) -> Tensor:
    return F.linear(net.one(net.two(net.one(x))), net.three.weight)


def _skip(net: Whatever, x: Tensor) -> Tensor:
    return net.three(net.two(net.one(x))) + x[:, :2]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (_branches, "its forward cannot be followed: an `if`, `while` or `assert` in it asks for values"),
        (_other_in_training, "its forward does other things in training than in testing"),
        (_all_shared, "the weights of 'one' are used before and after"),
        (_skip, r"the input is read again by getitem\(\) in forward, past '"),
        (lambda net, x: {"logits": net.three(net.one(x))}, "gives a dict; return the logits tensor alone"),
        (lambda net, x: net.three(net.one(x[:, :3])), r"fails on a batch of your data, shape \(2, 4\)"),
    ],
)
def test_what_is_in_the_way_is_said_in_words(
    forward: Callable[[Whatever, Tensor], object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        as_block_model(Whatever(forward), torch.randn(2, 4), name="mine")


def test_a_layer_that_is_used_twice_stays_in_one_block() -> None:
    assert as_block_model(Whatever(_shared), torch.randn(2, 4)).block_names == ("one", "three")


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.abs().sum() > 0 else x


def test_a_part_that_cannot_be_followed_stays_whole() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = Branch(), Branch(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.second(self.first(x)))

    assert as_block_model(Net(), torch.randn(2, 4)).block_names == ("first", "second", "last")


def test_other_threads_can_use_models_meanwhile() -> None:
    neighbour = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    given: list[type] = []

    with ThreadPoolExecutor(1) as pool:

        def forward(net: Whatever, x: Tensor) -> Tensor:
            given.append(type(pool.submit(neighbour, torch.ones(2, 4)).result()))
            return net.three(net.two(net.one(x)))

        as_block_model(Whatever(forward), torch.randn(2, 4))
    assert set(given) == {Tensor}, "while torch.fx follows a forward, and while it runs"
    assert len(given) > 2


def test_sizes_of_the_input_are_known_in_every_block() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(30, 2)

        def forward(self, x: Tensor) -> Tensor:
            (batch, length, _), half = x.shape, torch.full((x.size(0), 1, 1), 0.5, device=x.device)
            x = F.relu(self.two(self.one(x))) * half
            return self.three(x.reshape(batch, length * 6))

    net, x = Net(), torch.randn(3, 5, 4)
    model = as_block_model(net, x[:2])
    assert model.block_names == ("one", "two", "three")
    assert torch.equal(net(x), model(x))


def test_a_traced_model_can_be_copied_and_sent() -> None:
    x = nets.data("mlp")[0][:2]
    model = as_block_model(nets.Mlp(3), x).eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert torch.equal(model(x), other(x))
        other.train()
        torch.manual_seed(0)
        assert not torch.equal(model(x), other(x)), "dropout follows the mode of the copy"


def test_heterofl_can_narrow_a_traced_resnet() -> None:
    x = nets.data("resnet")[0][:2]
    small, places = as_block_model(nets.ResNet(3), x).narrow(0.5)
    assert small.eval()(x).shape == (2, 3)
    assert places["blocks.layer2_0.layer2.0.downsample.0.weight"] == (slice(0, 3), slice(0, 2))


def test_split_cuts_after_the_named_submodules() -> None:
    net, x = nets.ResNet(3), nets.data("resnet")[0][:2]
    parted = split(net, at=["layer1", "layer2", "layer4.0"])
    assert list(parted.state_dict()) == list(net.state_dict())
    model = as_block_model(parted, x)
    assert model.block_names == ("conv1", "layer2", "layer3", "layer4")
    assert torch.equal(net.eval()(x), model.eval()(x))
    assert torch.equal(net(x), parted.eval()(x))


def test_split_makes_blocks_of_about_equal_work() -> None:
    x = nets.data("resnet")[0][:2]
    blocks = split(nets.ResNet(3), num_blocks=4, sample_input=x).blocks()
    assert len(blocks) == 4
    assert len(as_block_model(split(nets.ResNet(3), num_blocks=2), x).block_names) == 2
    even = split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)), nn.Linear(4, 2)), num_blocks=3)
    assert list(even.blocks(torch.randn(2, 4))) == ["0", "2", "4"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"at": ["layer9"]}, r"it has no submodule 'layer9' \(did you mean 'layer"),
        ({"at": ["layer1.0.conv1"]}, "after 'layer1.0.conv1' the output of 'maxpool' is read again by add"),
        ({"at": ["fc"]}, "no layer with weights comes after 'fc'"),
        ({"num_blocks": 11}, "11 are wanted, but there are places for 10"),
    ],
)
def test_wrong_cuts_are_refused(how: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        as_block_model(split(nets.ResNet(3), **how), nets.data("resnet")[0][:2])  # type: ignore[arg-type]


def test_wrong_wishes_are_refused() -> None:
    with pytest.raises(ModelError, match="give `at` or `num_blocks`, not both"):
        split(nets.ResNet(3), at=["layer1"], num_blocks=3)
    with pytest.raises(ModelError, match="num_blocks = 1; a window needs at least 2"):
        split(nets.ResNet(3), num_blocks=1)
    with pytest.raises(ModelError, match=r"blocks\(sample_input\)"):
        split(nets.ResNet(3)).blocks()


def test_the_log_names_the_blocks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build("tests.models.nets:net", sample_input=nets.data("gru")[0][:2], num_classes=3, kind="gru")
    assert "has no method blocks() and was cut into 3 blocks: embed, gru, fc" in caplog.text


def test_the_pages_recipe_for_hugging_face_works() -> None:
    (code,) = re.findall(
        r"```python\n(from torch import nn\nfrom transformers.*?)```", PAGE.read_text(), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(code, names)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    net = names["Classifier"](3, names["BertConfig"](vocab_size=20, max_position_embeddings=12, **sizes))
    model = as_block_model(net, nets.data("bert")[0][:2])
    assert model.block_names == ("embeddings", "layers_0", "layers_1", "head")
