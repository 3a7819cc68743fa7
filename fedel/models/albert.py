"""ALBERT for masked words (section 5.1; appendix C.5): one block per depth, with an exit after each.

Mode ``frozen``: block b is pass b through the shared pretrained layer, and only its head trains. Mode
``unshared``: the layer is copied, so that every depth has its own weights.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedel import plugins
from fedel.errors import ModelError
from fedel.models.albert_layers import AlbertSizes, Embeddings, Frozen, Head, Layer, init_weights
from fedel.models.blocks import BlockModel

GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


def albert(
    mode: str = "frozen",
    weights: str | Path | None = None,
    bottleneck: int = 128,
    tied: bool = False,
    vocab_size: int = 30_000,
    embedding_size: int = 128,
    hidden_size: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    ffn_size: int = 3072,
    max_length: int = 512,
) -> BlockModel:
    """Token ids (N, L) -> logits (N, L, vocab_size).

    ``weights`` is a directory with a checkpoint in the format of ``transformers``, which then sets all
    sizes; without it the weights start at random. ``tied`` decodes with the frozen word embedding.
    """
    sizes = AlbertSizes(vocab_size, embedding_size, hidden_size, num_layers, num_heads, ffn_size, max_length)
    if weights is None:
        embeddings, layer = Embeddings(sizes), Layer(sizes)
        init_weights(embeddings, hidden_size)
        init_weights(layer, hidden_size)
        layers = [layer] * num_layers
    else:
        sizes, embeddings, layers = _pretrained(plugins.path_of(weights, "weights", ModelError))
    _check(mode, tied, bottleneck, sizes)
    build = _frozen if mode == "frozen" else _unshared
    return build(sizes, embeddings, layers, bottleneck, tied)


def _frozen(
    sizes: AlbertSizes, embeddings: Embeddings, layers: list[Layer], bottleneck: int, tied: bool
) -> BlockModel:
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    exits: OrderedDict[str, nn.Module] = OrderedDict()
    for depth, layer in enumerate(layers, start=1):
        parts = {"embeddings": embeddings, "layer": layer} if depth == 1 else {"layer": layer}
        blocks[f"layer{depth}"] = Frozen(OrderedDict[str, nn.Module](parts))
        exits[f"layer{depth}"] = _head(sizes, bottleneck, embeddings.word if tied else None)
    return BlockModel(
        "albert",
        blocks,
        exits,
        num_classes=sizes.vocab_size,
        stages=_quarters(len(blocks)),
        exit_each=True,
        frozen=("blocks",),
    )


def _unshared(
    sizes: AlbertSizes, embeddings: Embeddings, layers: list[Layer], bottleneck: int, _tied: bool
) -> BlockModel:
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    exits: OrderedDict[str, nn.Module] = OrderedDict()
    for depth, layer in enumerate(layers, start=1):
        parts: OrderedDict[str, nn.Module] = OrderedDict(layer=copy.deepcopy(layer))
        head = _head(sizes, bottleneck)
        if depth == 1:
            parts = OrderedDict(embeddings=embeddings, **parts)
        if depth == len(layers):
            parts["head"] = head
        else:
            exits[f"layer{depth}"] = head
        blocks[f"layer{depth}"] = nn.Sequential(parts)
    return BlockModel("albert", blocks, exits, num_classes=sizes.vocab_size, stages=_quarters(len(blocks)))


def _head(sizes: AlbertSizes, bottleneck: int, tied_to: nn.Embedding | None = None) -> Head:
    head = Head(sizes, bottleneck, tied_to)
    init_weights(head, sizes.hidden_size)
    return head


def _quarters(depth: int) -> tuple[int, ...]:
    """The depths at which DepthFL cuts: ALBERT itself has no stages.

    >>> _quarters(12), _quarters(3)
    ((3, 6, 9, 12), (1, 2, 3))
    """
    return tuple(sorted({-(-depth * quarter // 4) for quarter in (1, 2, 3, 4)}))


def _check(mode: str, tied: bool, bottleneck: int, sizes: AlbertSizes) -> None:
    if mode not in ("frozen", "unshared"):
        raise ModelError(f"ALBERT has no mode '{mode}'; use 'frozen' or 'unshared'")
    if tied and mode == "unshared":
        raise ModelError(
            "ALBERT's exits cannot be tied to an embedding that trains; use mode 'frozen' or tied = false"
        )
    if tied and bottleneck != sizes.embedding_size:
        raise ModelError(
            f"ALBERT's tied decoder needs the embedding's size {sizes.embedding_size} as bottleneck, not"
            f" {bottleneck}; set bottleneck = {sizes.embedding_size}"
        )
    if sizes.hidden_size % sizes.num_heads:
        raise ModelError(
            f"ALBERT's hidden size {sizes.hidden_size} cannot be divided among {sizes.num_heads} heads;"
            " make hidden_size a multiple of num_heads"
        )


def _pretrained(directory: Path) -> tuple[AlbertSizes, Embeddings, list[Layer]]:
    """The trunk of a checkpoint directory (``config.json`` and ``model.safetensors``)."""
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"no ALBERT checkpoint in '{directory}': config.json is missing; give the directory of a"
            " downloaded albert-base-v2, or leave 'weights' out for a random start"
        )
    source = _read(directory)
    config = source.config
    if config.inner_group_num != 1 or config.hidden_act not in GELU:
        raise ModelError(
            f"the checkpoint in '{directory}' has {config.inner_group_num} layers per group and the activation"
            f" {config.hidden_act}; use one with 1 layer and one of {', '.join(GELU)}"
        )
    sizes = AlbertSizes(
        vocab_size=config.vocab_size,
        embedding_size=config.embedding_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        ffn_size=config.intermediate_size,
        max_length=config.max_position_embeddings,
        gelu=GELU[config.hidden_act],
    )
    groups = [_copy_layer(group.albert_layers[0], sizes) for group in source.encoder.albert_layer_groups]
    layers = [groups[depth * len(groups) // sizes.num_layers] for depth in range(sizes.num_layers)]
    return sizes, _copy_embeddings(source, sizes), layers


def _read(directory: Path) -> Any:
    try:
        from transformers import AlbertModel
    except ImportError as error:
        raise ModelError("reading ALBERT weights needs transformers: pip install 'fedel[text]'") from error
    reader: Any = AlbertModel
    try:
        source, info = reader.from_pretrained(directory, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"the ALBERT checkpoint in '{directory}' cannot be read: {error}; copy it again"
        ) from error
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("pooler"))
    if missing:
        raise ModelError(
            f"the ALBERT checkpoint in '{directory}' lacks {len(missing)} tensors, first '{missing[0]}';"
            " use a complete checkpoint of AlbertModel or AlbertForMaskedLM"
        )
    return source


def _copy_embeddings(source: Any, sizes: AlbertSizes) -> Embeddings:
    embeddings, theirs = Embeddings(sizes), source.embeddings
    with torch.no_grad():
        embeddings.word.weight.copy_(theirs.word_embeddings.weight)
        # Every text is one segment, so the vector of the segment is a constant added to the positions.
        segment: Tensor = theirs.token_type_embeddings.weight[0]
        embeddings.position.weight.copy_(theirs.position_embeddings.weight + segment)
    embeddings.norm.load_state_dict(theirs.LayerNorm.state_dict())
    embeddings.project.load_state_dict(source.encoder.embedding_hidden_mapping_in.state_dict())
    return embeddings


def _copy_layer(source: Any, sizes: AlbertSizes) -> Layer:
    layer = Layer(sizes)
    pairs = {
        layer.query: source.attention.query,
        layer.key: source.attention.key,
        layer.value: source.attention.value,
        layer.out: source.attention.dense,
        layer.attention_norm: source.attention.LayerNorm,
        layer.ffn_in: source.ffn,
        layer.ffn_out: source.ffn_output,
        layer.norm: source.full_layer_layer_norm,
    }
    for ours, theirs in pairs.items():
        ours.load_state_dict(theirs.state_dict())
    return layer
