"""A folder of pictures: one subfolder for each class, ``data = "folder:PATH"`` in a job."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedel.data.dataset import Dataset, Split
from fedel.data.files import listed
from fedel.data.transforms import Images, measure
from fedel.errors import DataError
from fedel.seeds import generator
from fedel.types import Array

PREFIX = "folder:"
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".bmp": "BMP", ".webp": "WEBP"}
"""File names that are read, and the only formats that are tried on their content."""
_TEST_NAMES = ("test", "val", "valid", "validation")
_LARGEST_IMAGE = 20_000
"""Pixels in a row or column."""


def image_folder(
    path: Path,
    *,
    size: int = 32,
    test_share: float = 0.2,
    seed: int = 0,
    grey: bool = False,
    augment: bool = False,
) -> Dataset:
    """``path/CLASS/*.jpg``, or the same inside ``path/train`` and ``path/test`` (or ``val``).

    Pictures are made ``size`` x ``size`` pixels and kept in memory. Without a folder of test pictures,
    ``test_share`` of every class are for testing, drawn with ``seed``. ``augment`` crops and flips in training.
    """
    if size < 1 or not 0 < test_share < 1:
        raise DataError(
            f"{path}: size = {size}, test_share = {test_share:g}; a size is at least 1, a share in 0..1"
        )
    if not path.is_dir():
        raise DataError(f"{path}: there is no such folder; name one that has a subfolder for each class")
    if (path / "train").is_dir():
        tests = [path / name for name in _TEST_NAMES if (path / name).is_dir()]
        if not tests:
            raise DataError(f"{path}: has a folder `train` but none called {', '.join(_TEST_NAMES)}; add one")
        train, test = _files(path / "train"), _files(tests[0])
        unknown = sorted(test.keys() - train.keys())
        if unknown:
            raise DataError(
                f"{tests[0] / unknown[0]}: a class without training pictures; add some, or remove it"
            )
    else:
        train, test = _divided(_files(path), test_share, seed)
    classes = tuple(train)
    pixels, labels = _read(train, classes, size, grey)
    transform = Images(*measure(pixels), padding=size // 8 if augment else 0, flip=augment)
    splits = Split(pixels, labels), Split(*_read(test, classes, size, grey))
    return Dataset(path.name, "image", *splits, classes, transform)


def _files(folder: Path) -> dict[str, list[Path]]:
    """Class -> its pictures."""
    found = {
        place.name: [file for file in listed(place) if file.suffix.lower() in FORMATS]
        for place in listed(folder)
        if place.is_dir()
    }
    if len(found) < 2:
        raise DataError(f"{folder}: {len(found)} subfolder(s); give each of at least 2 classes a subfolder")
    for name, files in found.items():
        if not files:
            raise DataError(f"{folder / name}: holds no picture ({', '.join(FORMATS)}); remove it or fill it")
    return found


def _divided(
    files: dict[str, list[Path]], test_share: float, seed: int
) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    train, test = {}, {}
    for name, mine in files.items():
        if len(mine) < 2:
            raise DataError(f"{mine[0].parent}: 1 picture; a class needs one for training and one for testing")
        order = generator(seed, "folder", name).permutation(len(mine))
        count = min(len(mine) - 1, max(1, round(test_share * len(mine))))
        test[name] = [mine[row] for row in sorted(order[:count])]
        train[name] = [mine[row] for row in sorted(order[count:])]
    return train, test


def _read(files: dict[str, list[Path]], classes: tuple[str, ...], size: int, grey: bool) -> tuple[Array, Array]:
    total = sum(map(len, files.values()))
    pixels = np.empty((total, 1 if grey else 3, size, size), np.uint8)
    for row, file in enumerate(file for mine in files.values() for file in mine):
        pixels[row] = _picture(file, size, grey)
    labels = [classes.index(name) for name, mine in files.items() for _ in mine]
    return pixels, np.asarray(labels, np.int64)


def _picture(file: Path, size: int, grey: bool) -> Array:
    try:
        from PIL import Image, ImageOps
    except ImportError as problem:
        raise DataError("reading pictures needs Pillow; run `pip install pillow`") from problem
    mode = "L" if grey else "RGB"
    try:
        # Only the header is read here: what is too large, or another format, is not decoded.
        with Image.open(file, formats=sorted(set(FORMATS.values()))) as image:
            if max(image.size) > _LARGEST_IMAGE:
                raise DataError(f"{file}: {image.size} pixels, at most {_LARGEST_IMAGE} each way are read")
            image.draft(mode, (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
            upright = ImageOps.exif_transpose(image).convert(mode)
            pixels = np.asarray(upright.resize((size, size), Image.Resampling.BOX), np.uint8)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        raise DataError(f"{file}: not a readable picture ({problem}); remove it or save it again") from problem
    return pixels[None] if grey else pixels.transpose(2, 0, 1)
