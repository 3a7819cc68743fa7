"""The user's own model: split, given exits, or refused with a message that names the block."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedel.errors import ModelError
from fedel.models import BlockModel, as_block_model, build, load_model
from fedel.types import Role


class TokenMixer(nn.Module):
    """A transformer over token ids; ``pooled`` classifies the text, else each token."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.pool = _Mean() if pooled else nn.Identity()
        self.head = nn.Linear(8, 5)

    def blocks(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.pool, self.head]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.pool(x))
        return logits


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class Parts(nn.Module):
    """Whatever is listed is a block; forward is what is given, or the blocks one after the other."""

    def __init__(self, parts: Any, forward: nn.Module | None = None, exits: Any = None) -> None:
        super().__init__()
        self.parts, self.whole = parts, forward
        if exits is not None:
            self.exits = lambda: exits

    def blocks(self) -> Any:
        return self.parts

    def forward(self, x: Tensor) -> Any:
        if self.whole:
            return self.whole(x)
        for part in self.parts.values() if isinstance(self.parts, dict) else self.parts:
            x = part(x)
        return x


def cnn() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.5)),
        nn.Linear(6, 3),
    )


def shapes(model: BlockModel, x: Tensor) -> list[tuple[int, ...]]:
    return [tuple(logits.shape) for logits in model.eval().all_exits(x)]


def test_sequential_splits_at_its_weights_and_norms_join_the_block_before() -> None:
    x = torch.randn(2, 1, 8, 8)
    module = cnn()
    model = as_block_model(module, x)
    assert model.spec.block_names == ("block1", "block2", "block3")
    assert [type(m).__name__ for m in model.blocks["block1"].children()] == [
        "Conv2d",
        "BatchNorm2d",
        "ReLU",
        "MaxPool2d",
    ]
    assert model.num_classes == 3
    assert shapes(model, x) == 3 * [(2, 3)]
    assert torch.equal(module.eval()(x), model.eval()(x))


def test_leading_parts_without_weights_join_the_first_block_and_names_are_kept() -> None:
    parts = OrderedDict(flatten=nn.Flatten(), hidden=nn.Linear(64, 8), act=nn.ReLU(), out=nn.Linear(8, 4))
    model = as_block_model(nn.Sequential(parts), torch.randn(2, 1, 8, 8))
    assert model.spec.block_names == ("hidden", "out")
    assert [t.name for t in model.spec.weights] == [
        "blocks.hidden.hidden.weight",
        "blocks.hidden.hidden.bias",
        "blocks.out.weight",
        "blocks.out.bias",
    ]


def test_one_dimensional_convolutions_are_pooled_over_time() -> None:
    module = nn.Sequential(
        *(nn.Conv1d(2, 5, 3), nn.ReLU()),
        *(nn.Conv1d(5, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()),
        nn.Linear(6, 4),
    )
    x = torch.randn(2, 2, 16)
    model = as_block_model(module, x)
    assert model.spec.by_name["exits.block1.linear.weight"].shape == (4, 5 * 14), "no more than there are"
    assert model.spec.by_name["exits.block2.linear.weight"].shape == (4, 6)
    assert shapes(model, x) == 3 * [(2, 4)]


def test_transformer_for_texts_has_exits_over_the_mean_token() -> None:
    ids = torch.randint(20, (2, 7))
    model = as_block_model(TokenMixer(pooled=True), ids)
    assert model.spec.block_names == ("embed", "layers_0", "layers_1", "head")
    assert model.spec.by_name["exits.layers_0.norm.weight"].shape == (8,)
    assert shapes(model, ids) == 4 * [(2, 5)]


def test_transformer_for_tokens_has_exits_for_each_token() -> None:
    ids = torch.randint(20, (2, 7))
    model = as_block_model(TokenMixer(pooled=False), ids)
    assert shapes(model, ids) == 4 * [(2, 7, 5)]


def test_dry_run_leaves_statistics_modes_and_gradients_alone() -> None:
    module = cnn().train()
    module[7].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    as_block_model(module, torch.randn(2, 1, 8, 8))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert [m.training for m in module] == 7 * [True] + [False, True]
    assert all(p.grad is None for p in module.parameters())


def test_parameters_the_user_froze_stay_frozen() -> None:
    module = cnn()
    module[0].requires_grad_(False)
    spec = as_block_model(module, torch.randn(2, 1, 8, 8)).spec
    assert [t.name for t in spec.tensors if t.role is Role.FROZEN] == [
        "blocks.block1.0.weight",
        "blocks.block1.0.bias",
    ]


def test_users_own_exits_are_taken() -> None:
    heads = [nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2)), nn.Linear(5, 2)]
    parts = {"first": nn.Linear(4, 6), "second": nn.Linear(6, 5), "last": nn.Linear(5, 2)}
    for exits in (heads, dict(zip(parts, heads, strict=False))):
        model = as_block_model(Parts(parts, exits=exits), torch.randn(2, 4))
        assert model.spec.by_name["exits.first.0.weight"].shape == (9, 6)


def test_made_exits_have_as_many_features_as_asked_for() -> None:
    x = torch.randn(2, 1, 8, 8)

    def features(**options: int) -> list[int]:
        spec = as_block_model(cnn(), x, **options).spec
        return [t.shape[1] for t in spec.tensors if t.name.startswith("exits.") and t.name.endswith(".weight")]

    assert features() == [4 * 9, 6]
    assert features(exit_features=16) == [4 * 4, 6]
    assert features(exit_features=0) == [4, 6]


def test_the_option_exit_features_of_a_job_reaches_an_own_model() -> None:
    path, x = "tests.models.test_custom:cnn", torch.randn(2, 1, 8, 8)
    assert build(path, sample_input=x, exit_features=0).spec.by_name["exits.block1.linear.weight"].shape == (
        3,
        4,
    )


def test_own_exits_do_not_take_the_option_exit_features() -> None:
    with pytest.raises(ModelError, match=r"has exits\(\) of its own"):
        as_block_model(Parts(linear(4, 6, 2), exits=[nn.Linear(6, 2)]), torch.randn(2, 4), exit_features=0)


def linear(*sizes: int) -> list[nn.Module]:
    return [nn.Linear(a, b) for a, b in pairwise(sizes)]


class Returns(nn.Linear):
    def __init__(self, what: str) -> None:
        super().__init__(4, 4)
        self.what = what

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"tuple": (y, y), "scalar": y.mean(), "other batch": y.reshape(-1, 2), "labels": y.argmax(1)}[
            self.what
        ]


@pytest.mark.parametrize("what", ["tuple", "scalar", "other batch", "labels"])
def test_block_after_which_no_exit_can_be_built_is_named(what: str) -> None:
    module = Parts([*linear(4, 4), Returns(what), *linear(4, 2)], forward=nn.Linear(4, 2))
    with pytest.raises(ModelError, match="no exit can be built after block 2 'block2' of model 'custom'"):
        as_block_model(module, torch.randn(3, 4))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Parts(linear(4, 6, 2), forward=nn.Linear(4, 2)), "differ from its forward by"),
        (Parts(linear(4, 6), forward=nn.Linear(4, 2)), r"1 block\(s\) with weights"),
        (
            Parts(linear(4, 6, 3), forward=nn.Linear(4, 2)),
            r"give shape \(3, 3\), but its forward gives \(3, 2\)",
        ),
        (Parts([*linear(4, 6), *linear(5, 2)]), "block 2 'block2' .* fails on the output of the one before"),
        (Parts(linear(4, 6, 2), exits=[]), r"exits\(\) of model 'mine' returns 0 heads for 2 blocks"),
        (
            Parts(linear(4, 6, 2), exits=linear(5, 2)),
            "exit after block 1 'block1' .* failed on an input of shape",
        ),
        (Parts(linear(4, 6, 2), exits=linear(6, 3)), r"exit after block 1 'block1' .* gives shape \(3, 3\)"),
        (nn.Linear(4, 2), r"\(Linear\) cannot be split"),
        (nn.Sequential(nn.Linear(4, 2), nn.ReLU()), r"1 block\(s\) with weights"),
        (Parts([*linear(4, 6), nn.Linear(6, 8), nn.Unflatten(1, (2, 2, 2))]), "ends in shape"),
    ],
)
def test_models_that_cannot_be_split_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        as_block_model(module, torch.randn(3, 4), name="mine")


def test_weights_shared_between_blocks_are_refused_by_block() -> None:
    shared = nn.Linear(4, 4)
    with pytest.raises(ModelError, match="block 2 'block2' uses tensor"):
        as_block_model(Parts([shared, nn.Sequential(shared, nn.ReLU()), nn.Linear(4, 2)]), torch.randn(3, 4))


def test_wrong_number_of_classes_is_refused() -> None:
    with pytest.raises(ModelError, match=r"ends in shape \(2, 3\), not in \(batch, 10\)"):
        as_block_model(cnn(), torch.randn(2, 1, 8, 8), num_classes=10)


USER_MODULE = """
from torch import nn

def make_net(hidden=6):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))

def no_module():
    return 7

def in_need(depth, num_classes, *, kind):
    return make_net()

def broken():
    raise ZeroDivisionError("boom")
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_users_own_model.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "a_users_own_model"


def test_model_by_path_with_options(user_module: str) -> None:
    model = build(f"{user_module}:make_net", sample_input=torch.randn(2, 4), num_classes=3, hidden=9)
    assert model.spec.by_name["blocks.block1.0.weight"].shape == (9, 4)
    assert model.num_classes == 3


def test_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_beside_the_user.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert load_model("model_beside_the_user:make_net", torch.randn(2, 4)).num_classes == 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}:make_nett", "has no 'make_nett'; did you mean 'make_net'"),
        ("{}:zzzz", "has no 'zzzz'; valid are: .*make_net"),
        ("no_such_module:make_net", "there is no module 'no_such_module', neither in"),
        (":make_net", "write it as package.module:attribute"),
        ("{}:no_module", "returned a int; it must return a torch.nn.Module"),
    ],
)
def test_wrong_paths_are_refused(user_module: str, path: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(path.format(user_module), torch.randn(2, 4))


def test_plain_module_without_sample_is_refused(user_module: str) -> None:
    with pytest.raises(ModelError, match="need a sample input"):
        build(f"{user_module}:make_net")


def test_model_whose_classes_are_not_the_datas_is_refused(user_module: str) -> None:
    with pytest.raises(ModelError, match="has 3 classes, but the data has 10"):
        build(f"{user_module}:make_net", sample_input=torch.randn(2, 4), num_classes=10)


def test_unknown_option_of_the_users_function_gives_the_nearest(user_module: str) -> None:
    with pytest.raises(ModelError, match="has no option 'hiden'; did you mean 'hidden'"):
        build(f"{user_module}:make_net", sample_input=torch.randn(2, 4), hiden=3)


def test_a_missing_argument_of_the_users_function_is_named(user_module: str) -> None:
    with pytest.raises(ModelError, match=r"needs `depth`, `kind`: give it in \[workload.model_options\]"):
        build(f"{user_module}:in_need", sample_input=torch.randn(2, 4), num_classes=3)


def test_an_error_in_the_users_function_comes_with_its_traceback(
    user_module: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelError, match=r":broken' failed: ZeroDivisionError: boom; correct the function"):
        build(f"{user_module}:broken", sample_input=torch.randn(2, 4))
    assert f"model '{user_module}:broken' failed:" in caplog.messages
    assert 'a_users_own_model.py", line' in caplog.text


def test_a_first_layer_that_does_not_fit_the_data_is_said_so() -> None:
    with pytest.raises(
        ModelError, match=r"block 1 'block1' .* batch of your data, shape \(2, 4\): mat1 and mat2"
    ):
        as_block_model(nn.Sequential(*linear(5, 6, 2)), torch.randn(2, 4))


def test_half_precision_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'0.weight' is float16, but FedEL trains float32; call .float\(\)"):
        as_block_model(nn.Sequential(*linear(4, 6, 2)).half(), torch.randn(2, 4))


class Keyed(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


def test_a_dict_as_output_is_refused() -> None:
    module = Parts(linear(4, 6, 2), forward=Keyed(4, 2))
    with pytest.raises(ModelError, match="gives a dict; return the logits tensor alone"):
        as_block_model(module, torch.randn(2, 4))


def test_a_layer_in_no_block_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    module = Parts(linear(4, 6, 2))
    module.add_module("spare", nn.Sequential(nn.Linear(3, 3)))
    as_block_model(module, torch.randn(2, 4), name="mine")
    assert "model 'mine': `spare.0` is in no block and will not be trained" in caplog.messages
