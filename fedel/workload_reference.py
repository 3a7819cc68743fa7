"""The part of docs/job.md about models and data sets that come with FedEL: the arguments of their functions."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fedel.data import folder
from fedel.data.registry import ENTRIES
from fedel.job_keys import Key, plain, table
from fedel.models.registry import MODELS

MODEL_INTRO = """\
`[workload] model` names one of these, or a function of your own ([own-model.md](own-model.md)), whose
arguments are then the options. `num_classes`, `in_channels`, `image_size` and `vocab_size` come from the data
where the job does not set them. A model of your own has the option `exit_features`, too.
"""
DATA_INTRO = """\
`[workload] data` names one of these, or a function of your own ([data.md](data.md)), whose arguments are then
the options. Every data set has `num_train` and `num_test`, too: how many samples to keep, spread evenly over
all; 0 keeps all. `fedel data list` tells the size and licence of each and how to get it.
"""
OF_MODELS: Mapping[str, str] = {
    "num_classes": "Outputs of the model.",
    "in_channels": "Channels of an image.",
    "image_size": "Pixels of a side: no grid of averages is finer. 0: not known.",
    "width": "Every number of channels is this many times as large.",
    "batch_norm": "Whether there is batch normalisation after each convolution.",
    "hidden_layers": "Sizes of fully connected blocks before the classifier, such as `[512, 512]`.",
    "feature_size": "They read this many times this many averages of each channel.",
    "exit_features": "The most averages that an early exit reads, unless its block has more channels; 0: one "
    "of each channel.",
    "zero_init": "Whether every bottleneck starts as its shortcut.",
    "mode": "`frozen`: each block is a pass through one shared layer that does not train, only its exit does. "
    "`unshared`: every block has its own layer.",
    "weights": "A directory with a checkpoint in the format of `transformers`, which then sets all sizes. "
    "Without it the weights start at random.",
    "bottleneck": "Size of the hidden layer of an exit.",
    "tied": "Whether exits decode with the word embedding, which then does not train.",
    "vocab_size": "Words that the model knows.",
    "embedding_size": "Numbers per word in the embedding.",
    "hidden_size": "Numbers per word inside the network.",
    "num_layers": "Passes through the layer: blocks.",
    "num_heads": "Heads of attention.",
    "ffn_size": "Size of the feed-forward part of a layer.",
    "max_length": "The most words of a text.",
}
OF_DATA: Mapping[str, str] = {
    "augment": "Whether training samples change at random: images are moved and flipped, sounds are shifted.",
    "size": "Pixels of a side to which images are made smaller; 0, where it is the default, keeps them.",
    "waves": "Keep the sound itself and change it as sound; otherwise it is a log-mel image from the start.",
    "normalise": "Whether images have mean 0 and deviation 1; otherwise they are decibels, -80 to 0.",
    "num_frames": "Clips are cut or padded to this many frames.",
    "tokenizer": "ALBERT's `spiece.model` or its directory; without one, samples are made of words.",
    "block_size": "Words per sample.",
    "vocab_size": "The most words that are known; others are one unknown word.",
    "test_share": "Share of the samples that is for testing.",
    "seed": "Which pictures these are.",
    "grey": "Whether pictures are made grey.",
}
_OURS = ("folder", "path", "name")
"""Arguments that FedEL gives itself."""


def sections() -> list[str]:
    """Headings, texts and tables, one after the other."""
    parts = ["## Models: `[workload.model_options]`", MODEL_INTRO]
    for name, model in MODELS.items():
        parts += _section(f"`{name}`", model, OF_MODELS)
    parts += ["## Data sets: `[workload.data_options]`", DATA_INTRO]
    loaders: dict[Callable[..., Any], list[str]] = {}
    for name, entry in ENTRIES.items():
        loaders.setdefault(_function(entry.load), []).append(f"`{name}`")
    loaders[folder.image_folder] = [f"`{folder.PREFIX}PATH`"]
    for loader, names in loaders.items():
        parts += _section(", ".join(names), loader, OF_DATA)
    return parts


def options(function: Callable[..., Any], meanings: Mapping[str, str]) -> list[Key]:
    """What a job can set of a function's arguments."""
    function = _function(function)
    hints = typing.get_type_hints(function)
    return [
        Key(name, hints[name], argument.default, meanings.get(name, ""), ())
        for name, argument in inspect.signature(function).parameters.items()
        if name not in _OURS
    ]


def _section(title: str, function: Callable[..., Any], meanings: Mapping[str, str]) -> list[str]:
    return [f"### {title}", plain(inspect.getdoc(function) or ""), table(options(function, meanings))]


def _function(load: Callable[..., Any]) -> Callable[..., Any]:
    return load.func if isinstance(load, functools.partial) else load
