"""Converts the content of a registry package or an archive to the official layout of a data set.

Each function reads an unpacked directory and fills an empty one; unknown content is a DataError.
"""

from __future__ import annotations

import email
import email.policy
import email.utils
import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterable
from email.message import EmailMessage
from pathlib import Path

import numpy as np

from fedel.data.files import listed
from fedel.data.text import MIN_WORDS, VOCABULARY, Words, read_users
from fedel.data.vision import write_idx
from fedel.errors import DataError
from fedel.types import Array

Converter = Callable[[Path, Path], str]
"""(unpacked directory, empty directory to fill) -> a remark for the manifest, usually empty."""
CIFAR10_FILES = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
FOREIGN_CLOTHES = (
    "not the official split: this package mixes training and test images and about 8 % of its images are in "
    "neither; the last 1,000 of each class are used for testing"
)


def find(place: Path, pattern: str) -> Path:
    """The first file with that name anywhere below ``place``."""
    found = min(place.rglob(pattern), key=lambda p: (len(p.parts), p.as_posix()), default=None)
    if found is None:
        raise DataError(f"{place}: contains no {pattern}; is it another data set, or incomplete?")
    return found


def cifar10(place: Path, out: Path) -> str:
    """Copy the official Python batches, or make them from images with 10,000 rows of one picture each."""
    target = out / "cifar-10-batches-py"
    target.mkdir()
    official = next(place.rglob("data_batch_1"), None)
    if official is not None:
        for name in CIFAR10_FILES:
            shutil.copyfile(find(official.parent, name), target / name)
        return ""
    train_y = json.loads(find(place, "train_lables.json").read_text(encoding="utf-8"))
    test_y = json.loads(find(place, "test_lables.json").read_text(encoding="utf-8"))
    labels = [train_y[n : n + 10_000] for n in range(0, 50_000, 10_000)] + [test_y]
    for name, y in zip(CIFAR10_FILES, labels, strict=True):
        pixels = _cifar_png(find(place, f"{name}.png"))
        batch = {"batch_label": name, "labels": y, "data": pixels}
        # Protocol 2, which the official files use, would make the pixels half as large again from Python 3.
        (target / name).write_bytes(pickle.dumps(batch, protocol=3))
    return ""


def _cifar_png(path: Path) -> Array:
    try:
        from PIL import Image
    except ImportError as problem:
        raise DataError("converting CIFAR-10 needs Pillow; run `pip install pillow`") from problem
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, 1024 * 10_000
    try:
        with Image.open(path) as image:
            if image.size != (1024, 10_000):
                raise DataError(f"{path}: {image.size} pixels, expected 1024 x 10000")
            pixels = np.asarray(image.convert("RGB"))
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    planes = pixels.reshape(10_000, 1024, 3).transpose(0, 2, 1)
    return np.ascontiguousarray(planes).reshape(10_000, 3072)


def idx(place: Path, out: Path) -> str:
    """The four idx files, gzipped or not."""
    for name in IDX_FILES:
        source = find(place, f"{name}*")
        shutil.copyfile(source, out / (f"{name}.gz" if source.suffix == ".gz" else name))
    return ""


def fashion_mnist(place: Path, out: Path) -> str:
    if not (place / "package" / "src" / "clothes").is_dir():
        return idx(place, out)
    train, test = [], []
    for label in range(10):
        file = place / "package" / "src" / "clothes" / f"{label}.json"
        rows = json.loads(file.read_text(encoding="utf-8"))["data"]
        images = np.array([row for row in rows if len(row) == 784], np.uint8).reshape(-1, 28, 28)
        train.append(images[:-1000])
        test.append(images[-1000:])
    for part, images_of in (("train", train), ("t10k", test)):
        labels = np.repeat(np.arange(10, dtype=np.uint8), [len(i) for i in images_of])
        write_idx(out / f"{part}-images-idx3-ubyte", np.concatenate(images_of))
        write_idx(out / f"{part}-labels-idx1-ubyte", labels)
    return FOREIGN_CLOTHES


def tiny_imagenet(place: Path, out: Path) -> str:
    _copy_tree(find(place, "val_annotations.txt").parent.parent, out)
    return ""


def speech_commands(place: Path, out: Path) -> str:
    """Folders of wav files (any archive with the official layout), or one ready-made ``.npz``."""
    ready = next(place.rglob("*.npz"), None)
    if ready is not None:
        shutil.copyfile(ready, out / ready.name)
        return "ready-made log-mel images, no sound"
    _copy_tree(find(place, "*_nohash_*.wav").parent.parent, out)
    return ""


def fsdd(place: Path, out: Path) -> str:
    (out / "recordings").mkdir()
    _copy_tree(find(place, "[0-9]_*_*.wav").parent, out / "recordings")
    return ""


def spoken_digits(place: Path, out: Path) -> str:
    shutil.copyfile(find(place, "digits.npz"), out / "digits.npz")
    return "13 MFCCs per frame; speakers are not named"


def _copy_tree(source: Path, out: Path) -> None:
    for entry in listed(source):
        if entry.is_dir():
            shutil.copytree(entry, out / entry.name, ignore=shutil.ignore_patterns(".*"))
        else:
            shutil.copyfile(entry, out / entry.name)


def sotu(place: Path, out: Path) -> str:
    """Speeches in the order in which they were given; each president is one user."""
    files = sorted(find(place, "1*_*.json").parent.glob("[12]*_*.json"))
    records = (json.loads(f.read_text(encoding="utf-8")) for f in files)
    _write_users(out, [(str(r["name"]), str(r["text"])) for r in records])
    return ""


def mail(place: Path, out: Path) -> str:
    """Only mail that is not spam, only the authors' own words; authors get a pseudonym."""
    groups = ("easy-ham-1", "easy-ham-2", "hard-ham-1")
    files = [f for group in groups for f in sorted((place / "package" / "data" / group).glob("*.json"))]
    if not files:
        raise DataError(f"{place}: contains no package/data/*-ham-*/*.json; is it the spam-assassin package?")
    rows = [_mail_row(json.loads(f.read_text(encoding="utf-8"))["text"]) for f in files]
    _write_users(out, [row for row in rows if row is not None])
    return "authors are named by a hash of their address"


def _mail_row(raw: str) -> tuple[str, str] | None:
    message = email.message_from_string(raw)
    address = email.utils.parseaddr(str(message.get("From", "")))[1].lower()
    body = own_words(_plain_body(raw))
    if not address or not body:
        return None
    return f"author-{hashlib.sha256(address.encode()).hexdigest()[:8]}", body


def _plain_body(raw: str) -> str:
    """The decoded text part; mail of that time is often not well formed."""
    message = email.message_from_string(raw, EmailMessage, policy=email.policy.compat32)
    for part in message.walk():
        if part.get_content_type() == "text/plain":
            payload = part.get_payload(decode=True)
            return payload.decode("utf-8", "replace") if isinstance(payload, bytes) else ""
    return ""


_FOOTER = re.compile(r"^(-- ?|_{20,}|-{20,}|-{2,} ?(original|forwarded) message.*)$", re.IGNORECASE)
_QUOTED = re.compile(r"^\s*(>|\||[A-Za-z]{1,4}>|:\s)|(wrote|writes|said):?\s*$", re.IGNORECASE)
_ADDRESS = re.compile(r"\S+@\S+|(https?|ftp)://\S+|www\.\S+", re.IGNORECASE)


def own_words(body: str) -> str:
    """A mail without quotes, attributions, signature, list footer and addresses.

    >>> own_words("Ann wrote:\\n> Is it on?\\n\\nYes, see http://x.org now\\n-- \\nBob")
    'Yes, see now'
    """
    kept = []
    for line in body.splitlines():
        if _FOOTER.match(line):
            break
        if not _QUOTED.search(line):
            kept.append(_ADDRESS.sub(" ", line))
    return " ".join(" ".join(kept).split())


def users(place: Path, out: Path) -> str:
    """Your own text by user: one ``.txt`` per user, or a ``.jsonl`` / ``.tsv`` of author and text."""
    table = next((p for suffix in ("jsonl", "tsv") for p in listed(place, f"*.{suffix}")), None)
    if table is not None:
        shutil.copyfile(table, out / f"users{table.suffix}")
    else:
        for file in listed(find(place, "*.txt").parent, "*.txt"):
            shutil.copyfile(file, out / file.name)
    _write_vocabulary(out)
    return ""


def _write_users(out: Path, rows: Iterable[tuple[str, str]]) -> None:
    lines = (json.dumps({"author": author, "text": text}, ensure_ascii=False) for author, text in rows)
    (out / "users.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    _write_vocabulary(out)


def _write_vocabulary(out: Path) -> None:
    """Written once, so that every device uses the same word numbers."""
    if not (out / VOCABULARY).exists():
        texts = read_users(out).values()
        Words.build(text for text in texts if len(text.split()) >= MIN_WORDS).save(out / VOCABULARY)
