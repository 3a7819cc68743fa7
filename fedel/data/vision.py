"""Images in their official formats: CIFAR-10 batches, idx (MNIST, Fashion-MNIST), Tiny ImageNet folders."""

from __future__ import annotations

import math
import struct
import zlib
from importlib import import_module
from pathlib import Path

import numpy as np

from fedel.data.dataset import Dataset, Split
from fedel.data.files import decoded, first_with, listed
from fedel.data.safe_pickle import load_numbers
from fedel.data.transforms import Images, measure
from fedel.data.transforms import shrunk as _shrunk
from fedel.errors import DataError
from fedel.types import Array

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
TINY_MEAN, TINY_STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
DIGITS = tuple(str(d) for d in range(10))
CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_IDX_UBYTE = 8
_MOST_IDX_BYTES = 1024**3
_LARGEST_IMAGE = 4096
"""Pixels in a row or column."""


def cifar10(folder: Path, *, augment: bool = True, size: int = 0) -> Dataset:
    """``data_batch_1`` to ``_5`` and ``test_batch``, in ``folder`` or in ``cifar-10-batches-py`` inside it.

    ``size`` 16 or 8 gives smaller images, as for Tiny ImageNet.
    """
    place = first_with(folder, "data_batch_1")
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    *batches, test = ((_shrunk("cifar10", x, size), y) for x, y in (_cifar_batch(place / n) for n in names))
    train = Split(np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches]))
    padding = train.x.shape[-1] // 8 if augment else 0
    transform = Images(CIFAR10_MEAN, CIFAR10_STD, padding=padding, flip=augment)
    return Dataset("cifar10", "image", train, Split(*test), CIFAR10_CLASSES, transform)


def _cifar_batch(path: Path) -> tuple[Array, Array]:
    if not path.exists():
        raise DataError(f"{path}: missing; run `fedel data get cifar10`")
    batch = load_numbers(path)
    pixels, labels = batch.get(b"data"), batch.get(b"labels")
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list):
        raise DataError(f"{path}: has no `data` array or no `labels` list; is it a CIFAR-10 python batch?")
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape != (len(labels), 3 * 32 * 32):
        raise DataError(
            f"{path}: `data` is {pixels.dtype} {pixels.shape} for {len(labels)} labels, expected uint8 "
            f"({len(labels)}, 3072); download it again with `fedel data get cifar10`"
        )
    if not all(type(label) is int and 0 <= label < len(CIFAR10_CLASSES) for label in labels):
        raise DataError(
            f"{path}: has labels that are no classes; download it again with `fedel data get cifar10`"
        )
    return pixels.reshape(-1, 3, 32, 32), np.asarray(labels, np.int64)


def audit_cifar10(folder: Path) -> list[str]:
    """Batches that do not contain 10,000 images."""
    place = first_with(folder, "data_batch_1")
    files = [*(place / f"data_batch_{n}" for n in range(1, 6)), place / "test_batch"]
    sizes = {file: len(_cifar_batch(file)[1]) for file in files}
    return [f"{file}: {size:,} images, expected 10,000" for file, size in sizes.items() if size != 10_000]


def mnist(folder: Path, *, augment: bool = False, size: int = 0) -> Dataset:
    """``size`` 14 or 7 gives smaller images, as for Tiny ImageNet."""
    return _idx_dataset("mnist", folder, DIGITS, augment, flip=False, size=size)


def fashion_mnist(folder: Path, *, augment: bool = True, size: int = 0) -> Dataset:
    """``size`` 14 or 7 gives smaller images, as for Tiny ImageNet."""
    return _idx_dataset("fashion-mnist", folder, CLOTHES, augment, flip=True, size=size)


def _idx_dataset(
    name: str, folder: Path, classes: tuple[str, ...], augment: bool, flip: bool, size: int
) -> Dataset:
    splits = []
    for part in ("train", "t10k"):
        images, labels = (
            _idx_file(name, folder, f"{part}-{what}-ubyte") for what in ("images-idx3", "labels-idx1")
        )
        pixels = _shrunk(name, read_idx(images)[:, None], size)
        splits.append(Split(pixels, read_idx(labels).astype(np.int64)))
    mean, std = measure(splits[0].x)
    padding = splits[0].x.shape[-1] // 14 if augment else 0
    transform = Images(mean, std, padding=padding, flip=augment and flip)
    return Dataset(name, "image", splits[0], splits[1], classes, transform)


def _idx_file(name: str, folder: Path, stem: str) -> Path:
    for file in (folder / stem, folder / f"{stem}.gz"):
        if file.exists():
            return file
    raise DataError(f"{folder / stem}[.gz]: missing; run `fedel data get {name}`")


def read_idx(path: Path) -> Array:
    """An idx file of unsigned bytes, plain or gzipped."""
    try:
        raw = _unpacked(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(
            f"{path}: cannot be read ({problem}); it is damaged or incomplete, download it again"
        ) from problem
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != _IDX_UBYTE:
        raise DataError(f"{path}: does not start like an idx file of bytes; is it another format?")
    num_dims = raw[3]
    start = 4 + 4 * num_dims
    shape = struct.unpack_from(f">{min(num_dims, (len(raw) - 4) // 4)}I", raw, 4)
    expected = start + math.prod(shape)
    if len(shape) != num_dims or len(raw) != expected:
        raise DataError(f"{path}: {len(raw):,} bytes, but its header says {expected:,}; download it again")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _unpacked(data: bytes) -> bytes:
    """The content of a gzip file, which may be any number of times larger than the file: up to a limit."""
    unpacker = zlib.decompressobj(wbits=31)
    raw = unpacker.decompress(data, _MOST_IDX_BYTES)
    if not unpacker.eof:
        raise EOFError(f"it breaks off, or unpacks to more than {_MOST_IDX_BYTES:,} bytes")
    return raw


def audit_idx(folder: Path) -> list[str]:
    """Files that do not contain 60,000 or 10,000 entries."""
    problems = []
    for part, expected in (("train", 60_000), ("t10k", 10_000)):
        for what in ("images-idx3", "labels-idx1"):
            file = _idx_file(folder.name, folder, f"{part}-{what}-ubyte")
            size = len(read_idx(file))
            if size != expected:
                problems.append(f"{file}: {size:,} entries, expected {expected:,}")
    return problems


def write_idx(path: Path, values: Array) -> None:
    """Plain idx of unsigned bytes."""
    header = bytes([0, 0, _IDX_UBYTE, values.ndim]) + np.asarray(values.shape, ">u4").tobytes()
    path.write_bytes(header + np.ascontiguousarray(values, np.uint8).tobytes())


def tiny_imagenet(folder: Path, *, augment: bool = True, size: int = 0) -> Dataset:
    """``train/<wnid>/images`` and ``val`` with ``val_annotations.txt``; any subset of the 200 classes.

    ``size`` 32 or 16 gives smaller images, each pixel the mean of a square of pixels; 0 keeps the size.
    """
    place = first_with(folder, "train")
    wnids = tuple(p.name for p in listed(place / "train") if p.is_dir())
    if not wnids:
        raise DataError(f"{place / 'train'}: contains no class directories; is it Tiny ImageNet?")
    train_files = [p for wnid in wnids for p in listed(place / "train" / wnid / "images", "*.JPEG")]
    train_y = [wnids.index(p.parent.parent.name) for p in train_files]
    val_files, val_y = _tiny_val(place, wnids)
    files = train_files + val_files
    pixels = decoded(place, "images", files, lambda: {"x": _read_images(files)})["x"]
    pixels = _shrunk("tiny-imagenet", pixels, size)
    words = _tiny_words(place / "words.txt")
    return Dataset(
        "tiny-imagenet",
        "image",
        Split(pixels[: len(train_files)], np.asarray(train_y, np.int64)),
        Split(pixels[len(train_files) :], np.asarray(val_y, np.int64)),
        tuple(words.get(wnid, wnid) for wnid in wnids),
        Images(TINY_MEAN, TINY_STD, padding=pixels.shape[-1] // 8 if augment else 0, flip=augment),
    )


def _tiny_val(place: Path, wnids: tuple[str, ...]) -> tuple[list[Path], list[int]]:
    """The validation set is used as test set: the labels of the real test set are not public."""
    notes = place / "val" / "val_annotations.txt"
    if not notes.exists():
        raise DataError(f"{notes}: missing; it contains the labels of the validation images")
    files, labels = [], []
    for number, line in enumerate(notes.read_text(encoding="utf-8").splitlines(), 1):
        fields = line.split("\t")
        if len(fields) < 2:
            raise DataError(f"{notes}, line {number}: expected image<TAB>wnid..., found {line[:60]!r}")
        if fields[1] in wnids:
            files.append(place / "val" / "images" / fields[0])
            labels.append(wnids.index(fields[1]))
    missing = next((f for f in files if not f.exists()), None)
    if missing:
        raise DataError(f"{missing}: missing, but {notes.name} lists it; unpack the archive again")
    return files, labels


def _tiny_words(path: Path) -> dict[str, str]:
    """wnid -> first English name; the file is optional."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = (line.split("\t", 1) for line in lines if "\t" in line)
    return {wnid: names.split(",")[0] for wnid, names in pairs}


def _read_images(files: list[Path]) -> Array:
    try:
        from PIL import Image
    except ImportError as problem:
        raise DataError("reading JPEG files needs Pillow; run `pip install pillow`") from problem
    out = None
    for row, file in enumerate(files):
        try:
            # Only the headers are read here: what is not a small JPEG is not decoded.
            with Image.open(file, formats=("JPEG",)) as image:
                if max(image.size) > _LARGEST_IMAGE:
                    raise DataError(f"{file}: {image.size} pixels, at most {_LARGEST_IMAGE} each way are read")
                pixels = np.asarray(image.convert("RGB"), np.uint8)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
            raise DataError(f"{file}: not a readable image ({problem}); unpack the archive again") from problem
        if out is None:
            out = np.empty((len(files), 3, *pixels.shape[:2]), np.uint8)
        if pixels.shape[:2] != out.shape[2:]:
            raise DataError(f"{file}: {pixels.shape[:2]} pixels, the others have {out.shape[2:]}")
        out[row] = pixels.transpose(2, 0, 1)
    if out is None:
        raise DataError("Tiny ImageNet: no images found; expected train/<wnid>/images/*.JPEG")
    return out


def digits(folder: Path | None = None, *, augment: bool = False) -> Dataset:  # noqa: ARG001
    """1,797 digits of 8 x 8 pixels from scikit-learn; every sixth is for testing."""
    try:
        bunch = import_module("sklearn.datasets").load_digits()
    except ImportError as problem:
        raise DataError("`digits` comes with scikit-learn; run `pip install scikit-learn`") from problem
    x = (bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    y = bunch.target.astype(np.int64)
    test = np.arange(len(y)) % 6 == 5
    mean, std = measure(x[~test])
    return Dataset(
        "digits", "image", Split(x[~test], y[~test]), Split(x[test], y[test]), DIGITS, Images(mean, std)
    )
