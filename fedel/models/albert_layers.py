"""The parts of ALBERT (Lan et al., ICLR 2020) as plain layers; each projection has its own tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedel.models.narrow import cut, keep
from fedel.types import Where

NORM_EPS = 1e-12


@dataclass(frozen=True)
class AlbertSizes:
    """The defaults are those of albert-base-v2."""

    vocab_size: int = 30_000
    embedding_size: int = 128
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    ffn_size: int = 3072
    max_length: int = 512
    gelu: str = "tanh"
    """``tanh`` for the approximation, ``none`` for the exact GELU."""


class Embeddings(nn.Module):
    """Token ids (N, L) -> hidden states (N, L, H)."""

    def __init__(self, sizes: AlbertSizes) -> None:
        super().__init__()
        self.word = nn.Embedding(sizes.vocab_size, sizes.embedding_size)
        self.position = nn.Embedding(sizes.max_length, sizes.embedding_size)
        self.norm = nn.LayerNorm(sizes.embedding_size, eps=NORM_EPS)
        self.project = nn.Linear(sizes.embedding_size, sizes.hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden: Tensor = self.project(self.norm(self.word(ids) + self.position(positions)))
        return hidden


class Layer(nn.Module):
    """Self-attention and a feed-forward network, each with residual and norm; no padding, so no mask."""

    def __init__(self, sizes: AlbertSizes) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.num_heads = sizes.num_heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps=NORM_EPS)
        self.ffn_in = nn.Linear(hidden, sizes.ffn_size)
        self.gelu = nn.GELU(approximate=sizes.gelu)
        self.ffn_out = nn.Linear(sizes.ffn_size, hidden)
        self.norm = nn.LayerNorm(hidden, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        context = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.out(context))
        x = self.norm(x + self.ffn_out(self.gelu(self.ffn_in(x))))
        return x

    def _heads(self, x: Tensor) -> Tensor:
        num, length, features = x.shape
        return x.view(num, length, self.num_heads, features // self.num_heads).transpose(1, 2)

    def narrow_(self, width: float) -> Mapping[str, Where]:
        """HeteroFL cuts queries, keys and values inside each head, and all else to its first features."""
        full, ffn = self.query.in_features, keep(self.ffn_in.out_features, width)
        per_head = full // self.num_heads
        inner = np.concatenate([h * per_head + np.arange(keep(per_head, width)) for h in range(self.num_heads)])
        hidden = np.arange(keep(full, width))
        rows_and_columns = {
            "query": (inner, hidden),
            "key": (inner, hidden),
            "value": (inner, hidden),
            "out": (hidden, inner),
            "ffn_in": (np.arange(ffn), hidden),
            "ffn_out": (hidden, np.arange(ffn)),
        }
        places: dict[str, Where] = {}
        for name, (rows, columns) in rows_and_columns.items():
            linear = getattr(self, name)
            linear.out_features, linear.in_features = len(rows), len(columns)
            places[f"{name}.weight"] = cut(linear, "weight", np.ix_(rows, columns))
            places[f"{name}.bias"] = cut(linear, "bias", (rows,))
        for name in ("attention_norm", "norm"):
            norm = getattr(self, name)
            norm.normalized_shape = (len(hidden),)
            for tensor in ("weight", "bias"):
                places[f"{name}.{tensor}"] = cut(norm, tensor, (hidden,))
        return places


class Frozen(nn.Sequential):
    """A pass through the pretrained trunk; neither the width nor training changes it."""

    def narrow_(self, width: float) -> Mapping[str, Where]:  # noqa: ARG002
        return {}


class TiedDecoder(nn.Module):
    """Scores of all words from the frozen embedding; the decoder itself only has a bias."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    def forward(self, x: Tensor) -> Tensor:
        # A narrowed bottleneck uses the first features of the embedding.
        return F.linear(x, self.weight[:, : x.shape[-1]], self.bias)

    def narrow_(self, width: float) -> Mapping[str, Where]:  # noqa: ARG002
        return {}


class Head(nn.Sequential):
    """Hidden states -> a score for every word, through a bottleneck unless its size is 0."""

    def __init__(self, sizes: AlbertSizes, bottleneck: int, tied_to: nn.Embedding | None = None) -> None:
        super().__init__()
        self.add_module("norm", nn.LayerNorm(sizes.hidden_size, eps=NORM_EPS))
        if bottleneck:
            self.add_module("dense", nn.Linear(sizes.hidden_size, bottleneck))
            self.add_module("gelu", nn.GELU(approximate=sizes.gelu))
        features = bottleneck or sizes.hidden_size
        decoder = TiedDecoder(tied_to) if tied_to else nn.Linear(features, sizes.vocab_size)
        self.add_module("decoder", decoder)


def init_weights(model: nn.Module, hidden_size: int) -> None:
    """ALBERT's initial values: normal with deviation 0.02, biases 0.

    0.02 belongs to ALBERT's hidden size of 768. A layer of size 48 would add almost nothing to its input, and
    training does not get past the frequency of words; so the deviation grows as the size shrinks.
    """
    deviation = 0.02 * math.sqrt(768 / hidden_size)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=deviation)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
