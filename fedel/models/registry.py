"""Models by name: those of the paper, a small one, or your own ``package.module:function``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedel.errors import ModelError
from fedel.models.albert import albert
from fedel.models.blocks import BlockModel
from fedel.models.custom import find_function, load_model
from fedel.models.resnet50 import resnet50
from fedel.models.vgg16 import small_cnn, vgg16

MODELS: dict[str, Callable[..., BlockModel]] = {
    "vgg16": vgg16,
    "resnet50": resnet50,
    "albert": albert,
    "cnn": small_cnn,
}


def build(
    name: str, *, sample_input: Tensor | None = None, num_classes: int | None = None, **options: Any
) -> BlockModel:
    """A new model; its values are drawn from torch's current seed.

    ``num_classes`` is that of the data: passed to the model if it has such an option, and always checked.
    ``sample_input`` is a batch of the data: it sets ``in_channels`` of an image model, and the exits of your
    own model are made from it.
    """
    function = find_function(name) if ":" in name else _named(name)
    taken = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    for option in options:
        if option not in taken and not open_ended:
            near = difflib.get_close_matches(option, taken, 1)
            raise ModelError(
                f"model '{name}' has no option '{option}'"
                + (f"; nearest: '{near[0]}'" if near else f"; it takes {', '.join(taken) or 'none'}")
            )
    # The classes of a language model are its vocabulary.
    for option in ("num_classes", "vocab_size"):
        if num_classes is not None and option in taken:
            options.setdefault(option, num_classes)
    if sample_input is not None and sample_input.ndim == 4 and "in_channels" in taken:
        options.setdefault("in_channels", sample_input.shape[1])
    model = load_model(name, sample_input, **options) if ":" in name else function(**options)
    if num_classes is not None and model.num_classes != num_classes:
        raise ModelError(
            f"model '{name}' has {model.num_classes} classes, but the data has {num_classes};"
            " make its last layer fit the data"
        )
    return model


def _named(name: str) -> Callable[..., BlockModel]:
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(name.lower(), MODELS, 1)
    raise ModelError(
        f"there is no model '{name}'"
        + (f"; nearest: '{near[0]}'" if near else "")
        + f"; use one of {', '.join(MODELS)}, or your own as 'package.module:function'"
    )
