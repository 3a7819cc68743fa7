"""ALBERT in both modes, on a small configuration, against the implementation in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedel.errors import ModelError
from fedel.models.albert import albert
from fedel.types import Role

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "embedding_size": 8,
    "hidden_size": 24,
    "num_layers": 4,
    "num_heads": 3,
    "ffn_size": 40,
    "max_length": 16,
    "bottleneck": 8,
}
IDS = torch.arange(14).reshape(2, 7)


@pytest.mark.parametrize(("mode", "options"), [("frozen", {}), ("frozen", {"tied": True}), ("unshared", {})])
def test_every_depth_gives_logits_for_every_token(mode: str, options: dict[str, Any]) -> None:
    model = albert(mode, **SIZES, **options)
    assert [logits.shape for logits in model.all_exits(IDS)] == 4 * [(2, 7, 50)]
    assert torch.equal(model(IDS), model.all_exits(IDS)[-1])


def test_frozen_trunk_counts_once_and_heads_are_the_weights() -> None:
    spec = albert("frozen", **SIZES).spec
    assert spec.exit_each
    trunk = [t for t in spec.tensors if t.role is Role.FROZEN]
    assert {t.block for t in trunk} == {1}
    assert all(t.name.startswith("blocks.layer1.") for t in trunk)
    assert len(trunk) == 6 + 16
    assert [t.name for t in spec.weights_in(3, 3)] == [
        f"exits.layer3.{layer}.{tensor}"
        for layer in ("norm", "dense", "decoder")
        for tensor in ("weight", "bias")
    ]


def test_frozen_trunk_builds_no_graph() -> None:
    model = albert("frozen", **SIZES)
    h = model.run(IDS, 1, 4)
    assert not h.requires_grad
    assert model.exit(4, h).requires_grad


def test_frozen_depths_pass_through_the_same_layer() -> None:
    model = albert("frozen", **SIZES)
    h = model.run(IDS, 1, 1)
    assert torch.equal(model.run(h, 2, 2), model.run(h, 4, 4))


def test_tied_decoder_has_only_its_bias() -> None:
    spec = albert("frozen", **SIZES, tied=True).spec
    assert [t.name.removeprefix("exits.layer2.") for t in spec.weights_in(2, 2)] == [
        "norm.weight",
        "norm.bias",
        "dense.weight",
        "dense.bias",
        "decoder.bias",
    ]


def test_unshared_layers_start_equal_and_train_apart() -> None:
    model = albert("unshared", **SIZES)
    values = model.tensors()
    query = "blocks.layer{}.layer.query.weight"
    assert np.array_equal(values[query.format(1)], values[query.format(4)])
    model(IDS).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert not torch.equal(grads[query.format(1)], grads[query.format(4)])


def test_projections_are_separate_tensors() -> None:
    names = [t.name for t in albert("unshared", **SIZES).spec.weights_in(2, 2)]
    assert names[:8:2] == [f"blocks.layer2.layer.{p}.weight" for p in ("query", "key", "value", "out")]


@pytest.mark.parametrize("mode", ["frozen", "unshared"])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_checkpoint_gives_the_hidden_states_of_transformers(tmp_path: Path, mode: str, num_groups: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AlbertConfig(
        vocab_size=50,
        embedding_size=8,
        hidden_size=24,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=16,
        num_hidden_groups=num_groups,
    )
    theirs = transformers.AlbertModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    model = albert(mode, weights=tmp_path)
    assert model.num_classes == 50
    expected = theirs(IDS, output_hidden_states=True).hidden_states
    for depth in (1, 2, 3):
        torch.testing.assert_close(model.run(IDS, 1, depth), expected[depth], rtol=1e-4, atol=1e-5)


def test_directory_without_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no ALBERT checkpoint in '.*absent': config.json is missing"):
        albert(weights=tmp_path / "absent")


def test_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AlbertConfig().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ModelError, match="cannot be read"):
        albert(weights=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "shared"}, "no mode 'shared'; use 'frozen' or 'unshared'"),
        ({"mode": "unshared", "tied": True}, "cannot be tied"),
        ({"tied": True, "bottleneck": 6}, "set bottleneck = 8"),
        ({"hidden_size": 25}, "25 cannot be divided among 3 heads"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        albert(**(SIZES | options))


def test_a_small_model_hears_its_neighbours_from_the_start() -> None:
    """With ALBERT's deviation of 0.02, a neighbour moves logits by less than 1 % of the token's own effect."""
    torch.manual_seed(1)
    model = albert("unshared", **SIZES).eval()
    other = IDS.clone()
    other[:, 3] = 40
    with torch.no_grad():
        change = (model(other) - model(IDS)).norm(dim=-1)
    assert change[:, 2].mean() > 0.05 * change[:, 3].mean()
