"""Models by name: those of the paper, a small one, or your own (see ``fedel.plugins``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fedel import plugins
from fedel.config import nearest
from fedel.errors import ModelError
from fedel.models.albert import albert
from fedel.models.blocks import BlockModel
from fedel.models.custom import as_model
from fedel.models.resnet50 import resnet50
from fedel.models.vgg16 import small_cnn, vgg16

MODELS: dict[str, Callable[..., BlockModel]] = {
    "vgg16": vgg16,
    "resnet50": resnet50,
    "albert": albert,
    "cnn": small_cnn,
}

GROUP = "fedel.models"
"""Entry points of installed packages that bring models."""


def build(
    name: str, *, sample_input: Tensor | None = None, num_classes: int | None = None, **options: Any
) -> BlockModel:
    """A new model; its values are drawn from torch's current seed.

    ``num_classes`` is that of the data: passed to the model if it has such an option, and always checked.
    ``sample_input`` is a batch of the data: it sets ``in_channels`` and ``image_size`` of an image model, and
    the exits of your own model are made from it, with at most ``exit_features`` features.
    """
    return make(name, sample_input=sample_input, num_classes=num_classes, **options)[1]


def make(
    named: str | Callable[..., nn.Module],
    *,
    sample_input: Tensor | None = None,
    num_classes: int | None = None,
    **options: Any,
) -> tuple[nn.Module, BlockModel]:
    """As ``build``, of a name or a function: the module as the function returned it, and the model that has its
    layers."""
    name = named if isinstance(named, str) else getattr(named, "__name__", type(named).__name__)
    function = named if callable(named) else _function(name)
    taken = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    # The exits of a plain module are made here, not by the function.
    exit_features = None if "exit_features" in taken else options.pop("exit_features", None)
    for option in options:
        if option not in taken and not open_ended:
            raise ModelError(f"model '{name}' has no option '{option}'; {nearest(option, taken)}")
    # The classes of a language model are its vocabulary.
    for option in ("num_classes", "vocab_size"):
        if num_classes is not None and option in taken:
            options.setdefault(option, num_classes)
    if sample_input is not None and sample_input.ndim == 4:
        for option, size in (
            ("in_channels", sample_input.shape[1]),
            ("image_size", min(sample_input.shape[2:])),
        ):
            if option in taken:
                options.setdefault(option, size)
    own = function(**options)
    model = as_model(own, name, sample_input, exit_features)
    if num_classes is not None and model.num_classes != num_classes:
        raise ModelError(
            f"model '{name}' has {model.num_classes} classes, but the data has {num_classes};"
            " make its last layer fit the data"
        )
    return own, model


def _function(name: str) -> Callable[..., nn.Module]:
    return MODELS[name] if name in MODELS else plugins.find(name, GROUP, "model", ModelError, MODELS)
