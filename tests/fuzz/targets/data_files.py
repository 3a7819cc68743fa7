"""Files of data sets, as users bring them."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import shutil
import tarfile
import wave
import zipfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from fedel.data import speech, store, text, vision
from fedel.data.files import unpack
from fedel.data.waves import read_wav
from tests.fuzz.mutate import json_case, mutate_bytes
from tests.fuzz.target import Read, Target, reads_file

RATE = 16_000


def _cifar() -> list[bytes]:
    rng = np.random.default_rng(0)
    batch = {
        "data": rng.integers(0, 256, (2, 3072), np.uint8),
        "labels": [3, 7],
        "filenames": [b"a.png", b"b.png"],
    }
    return [pickle.dumps(batch, protocol=protocol) for protocol in (2, 3, 4)]


def _idx() -> bytes:
    return bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4]) + bytes(range(24))


def _wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes(bytes(range(200)))
    return file.getvalue()


def _npz() -> bytes:
    rng, file = np.random.default_rng(0), io.BytesIO()
    np.savez(
        file,
        x=rng.integers(0, 256, (6, 32, 32), np.uint8),
        y=np.arange(6) % 2,
        words=np.array(["yes", "no"]),
        speaker=np.arange(6) % 3,
        split=np.array([0, 0, 0, 0, 2, 2]),
    )
    return file.getvalue()


def _image() -> list[bytes]:
    made = []
    for settings in ({}, {"progressive": True}):
        file = io.BytesIO()
        pixels = (np.arange(768) % 251).astype(np.uint8).reshape(16, 16, 3)
        Image.fromarray(pixels).save(file, "JPEG", **settings)
        made.append(file.getvalue())
    return made


def _archives() -> list[bytes]:
    made = []
    for mode in ("w", "w:gz", "w:xz"):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode=mode) as tar:  # type: ignore[call-overload]
            for name in ("a/one.txt", "a/two.txt"):
                member = tarfile.TarInfo(name)
                member.size = 100
                tar.addfile(member, io.BytesIO(bytes(100)))
        made.append(file.getvalue())
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as pack:
        pack.writestr("a/one.txt", bytes(100))
    return [*made, file.getvalue()]


def _unpack(folder: Path) -> Read:
    archive, target, outside = folder / "archive", folder / "in" / "target", folder / "in"

    def read(data: bytes) -> object:
        shutil.rmtree(outside, ignore_errors=True)
        target.mkdir(parents=True)
        archive.write_bytes(data)
        try:
            return unpack(archive, target)
        finally:
            assert [target] == list(outside.iterdir()), "something was written outside the target"

    return read


def _users() -> bytes:
    words = " ".join(f"word{n}" for n in range(800))
    return "".join(json.dumps({"author": f"u{n}", "text": words}) + "\n" for n in range(2)).encode()


def _users_case(rng: Random, valid: bytes, others: Sequence[bytes]) -> bytes:
    lines = valid.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json_case(rng, lines[at], others)
    return b"\n".join(lines)


def _vocabulary(path: Path) -> object:
    return text.Words.load(path).encode("a b c")


def _manifest() -> bytes:
    files = {"a.txt": {"bytes": 3, "sha256": "0" * 64}}
    table = {"name": "x", "source": "y", "remark": "", "num_train": 1, "num_test": 1, "files": files}
    return json.dumps(table).encode()


DATA_FILES = (
    Target("cifar10_batch", _cifar, mutate_bytes, reads_file("data_batch_1", vision._cifar_batch)),
    Target("idx", lambda: [_idx()], mutate_bytes, reads_file("x-ubyte", vision.read_idx)),
    Target(
        "idx_gz", lambda: [gzip.compress(_idx(), mtime=0)], mutate_bytes, reads_file("x.gz", vision.read_idx)
    ),
    Target("wav", lambda: [_wav()], mutate_bytes, reads_file("a.wav", lambda path: read_wav(path, RATE))),
    Target("log_mel_npz", lambda: [_npz()], mutate_bytes, reads_file("a.npz", speech.ready_log_mel)),
    Target("image", _image, mutate_bytes, reads_file("a.JPEG", lambda path: vision._read_images([path]))),
    Target("archive", _archives, mutate_bytes, _unpack, seconds=2.0),
    Target("users_jsonl", lambda: [_users()], _users_case, reads_file("users.jsonl", text.user_text)),
    Target(
        "users_tsv",
        lambda: [b"author\ttext\nu1\t" + b" ".join(b"w%d" % n for n in range(800)) + b"\n"],
        mutate_bytes,
        reads_file("users.tsv", text.user_text),
    ),
    Target(
        "vocabulary",
        lambda: ["".join(f"{piece}\n" for piece in (*text.SPECIAL, "a", "b")).encode()],
        mutate_bytes,
        reads_file("vocabulary.txt", _vocabulary),
    ),
    Target(
        "data_manifest",
        lambda: [_manifest()],
        json_case,
        reads_file("manifest.json", lambda path: store.read_manifest(path.parent)),
    ),
)
