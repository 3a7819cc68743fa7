"""Image formats, written byte by byte as the official files are."""

from __future__ import annotations

import gzip
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedel.data import vision
from fedel.data.dataset import Dataset
from fedel.errors import DataError


def python2_batch(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A pickle as Python 2 wrote the official CIFAR-10 batches."""

    def text(b: bytes) -> bytes:
        return b"U" + bytes([len(b)]) + b if len(b) < 256 else b"T" + struct.pack("<i", len(b)) + b

    minus = b"J\xff\xff\xff\xff"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01K" + bytes([len(pixels)]) + b"M\x00\x0c\x86cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
        b"(K\x03" + text(b"|") + b"NNN" + minus + minus + b"K\x00tb\x89" + text(pixels.tobytes()) + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([y]) for y in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def write_cifar(folder: Path, count: int = 4) -> np.ndarray:
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (6, count, 3072), np.uint8)
    for n, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        (folder / name).write_bytes(python2_batch(pixels[n], [(n + k) % 10 for k in range(count)]))
    return pixels


def test_cifar10_official_python_batches(tmp_path: Path) -> None:
    pixels = write_cifar(tmp_path / "cifar-10-batches-py")
    data = vision.cifar10(tmp_path)
    assert (20, 4) == (len(data.train), len(data.test))
    np.testing.assert_array_equal(pixels[:5].reshape(20, 3, 32, 32), data.train.x)
    assert [0, 1, 2, 3, 1, 2] == data.train.y[:6].tolist()
    assert (3, 32, 32) == data.input_shape


def test_cifar10_batches_written_by_python_3(tmp_path: Path) -> None:
    pixels = write_cifar(tmp_path / "c")
    for protocol in (2, 3, 4):
        batch = {"data": pixels[0], "labels": [7, 7, 7, 7]}
        (tmp_path / "c" / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=protocol))
        assert [7, 7, 7, 7] == vision.cifar10(tmp_path).train.y[:4].tolist()


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("owned",)


def test_a_pickle_with_code_in_it_is_refused_and_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cifar(tmp_path / "c")
    (tmp_path / "c" / "data_batch_2").write_bytes(pickle.dumps({"data": Evil(), "labels": []}))
    with pytest.raises(DataError, match=r"data_batch_2: .*builtins.print, which is not allowed"):
        vision.cifar10(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("dtype", [object, "U4"])
def test_a_pickle_with_arrays_of_other_things_than_numbers_is_refused(tmp_path: Path, dtype: object) -> None:
    write_cifar(tmp_path / "c")
    bad = {"data": np.zeros(2, dtype), "labels": [0, 1]}  # type: ignore[call-overload]
    (tmp_path / "c" / "test_batch").write_bytes(pickle.dumps(bad, protocol=2))
    with pytest.raises(DataError, match="test_batch"):
        vision.cifar10(tmp_path)


def test_cifar10_damage_names_the_file(tmp_path: Path) -> None:
    place = tmp_path / "cifar-10-batches-py"
    write_cifar(place)
    whole = (place / "data_batch_3").read_bytes()
    (place / "data_batch_3").write_bytes(whole[:1000])
    with pytest.raises(DataError, match=r"data_batch_3.*download"):
        vision.cifar10(tmp_path)
    (place / "data_batch_3").unlink()
    with pytest.raises(DataError, match="data_batch_3: missing; run `fedel data get cifar10`"):
        vision.cifar10(tmp_path)


def test_audit_names_the_batch_with_too_few_images(tmp_path: Path) -> None:
    write_cifar(tmp_path / "c")
    assert len(vision.audit_cifar10(tmp_path)) == 6
    assert "data_batch_1: 4 images, expected 10,000" in vision.audit_cifar10(tmp_path)[0]


def write_mnist(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 5), ("t10k", 3)):
        images = (
            struct.pack(">4I", 0x803, count, 28, 28) + rng.integers(0, 256, count * 784, np.uint8).tobytes()
        )
        labels = struct.pack(">2I", 0x801, count) + bytes(range(count))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images, mtime=0))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)


def test_idx_plain_and_gzipped(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    data = vision.mnist(tmp_path)
    assert ((5, 1, 28, 28), [0, 1, 2]) == (data.train.x.shape, data.test.y.tolist())
    x, _ = data.train_batch(np.arange(5))
    assert abs(x.mean()) < 0.01


@pytest.mark.parametrize("read", [vision.mnist, vision.fashion_mnist])
def test_mnist_halved_averages_squares_of_pixels(tmp_path: Path, read: Callable[..., Dataset]) -> None:
    write_mnist(tmp_path)
    whole, half = read(tmp_path, augment=True), read(tmp_path, augment=True, size=14)
    assert half.train.x.shape[1:] == half.test.x.shape[1:] == half.input_shape == (1, 14, 14)
    assert abs(int(half.test.x[1, 0, 3, 4]) - whole.test.x[1, 0, 6:8, 8:10].mean()) <= 0.5
    assert abs(half.train_batch(np.arange(5))[0].std() - 1) < 0.1, "normalised by the halved images' own spread"
    with pytest.raises(DataError, match="mnist: size = 8"):
        read(tmp_path, size=8)


def test_idx_round_trip(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    vision.write_idx(tmp_path / "x", values)
    np.testing.assert_array_equal(values, vision.read_idx(tmp_path / "x"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "t10k-labels-idx1-ubyte",
            struct.pack(">2I", 0x801, 3) + b"\0",
            "9 bytes, but its header says 11",
        ),
        ("t10k-labels-idx1-ubyte", b"hello, world", "does not start like an idx file"),
        ("train-images-idx3-ubyte.gz", gzip.compress(b"x" * 9999, mtime=0)[:20], "damaged or incomplete"),
    ],
)
def test_damaged_idx_names_the_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        vision.mnist(tmp_path)
    assert name in str(caught.value)


def write_tiny(folder: Path) -> None:
    colours = {"n02": (250, 0, 0), "n01": (0, 0, 250)}
    for wnid, colour in colours.items():
        images = folder / "train" / wnid / "images"
        images.mkdir(parents=True)
        for n in range(3):
            Image.new("RGB" if n else "L", (64, 64), colour if n else 128).save(images / f"{wnid}_{n}.JPEG")
    val = folder / "val" / "images"
    val.mkdir(parents=True)
    notes = ""
    for n, wnid in enumerate(("n02", "n01", "n02")):
        Image.new("RGB", (64, 64), colours[wnid]).save(val / f"val_{n}.JPEG")
        notes += f"val_{n}.JPEG\t{wnid}\t0\t0\t62\t62\n"
    (folder / "val" / "val_annotations.txt").write_text(notes + "val_9.JPEG\tn99\t0\t0\t1\t1\n")
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius auratus\n")


def test_tiny_imagenet_folders_with_grey_images_and_classes_that_are_not_there(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny-imagenet-200")
    for _ in ("decoded now", "read from the kept copy"):
        data = vision.tiny_imagenet(tmp_path)
        assert ("goldfish", "n02") == data.classes
        assert ([0, 0, 0, 1, 1, 1], [1, 0, 1]) == (data.train.y.tolist(), data.test.y.tolist())
        assert data.train.x[1, :, 9, 9].argmax() == 2
        assert data.test.x[0, :, 9, 9].argmax() == 0
        assert data.train.x[0, :, 9, 9].std() < 3
    assert len(list((tmp_path / "tiny-imagenet-200" / ".decoded").iterdir())) == 1


def test_tiny_imagenet_halved_averages_squares_of_pixels(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    whole = vision.tiny_imagenet(tmp_path).train.x
    half = vision.tiny_imagenet(tmp_path, size=whole.shape[-1] // 2).train.x
    assert half.shape == (*whole.shape[:2], whole.shape[2] // 2, whole.shape[3] // 2)
    assert abs(int(half[0, 0, 1, 2]) - whole[0, 0, 2:4, 4:6].mean()) <= 0.5
    with pytest.raises(DataError, match="can be halved"):
        vision.tiny_imagenet(tmp_path, size=7)


def test_cifar10_halved_averages_squares_of_pixels(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar-10-batches-py")
    whole, half = vision.cifar10(tmp_path), vision.cifar10(tmp_path, size=16)
    assert half.train.x.shape[1:] == half.test.x.shape[1:] == half.input_shape == (3, 16, 16)
    assert abs(int(half.test.x[1, 2, 3, 4]) - whole.test.x[1, 2, 6:8, 8:10].mean()) <= 0.5
    with pytest.raises(DataError, match="cifar10: size = 7"):
        vision.cifar10(tmp_path, size=7)


def test_tiny_imagenet_sees_that_files_changed(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    assert len(vision.tiny_imagenet(tmp_path).train) == 6
    (tmp_path / "train" / "n01" / "images" / "n01_2.JPEG").unlink()
    assert len(vision.tiny_imagenet(tmp_path).train) == 5


def test_tiny_imagenet_damage_names_the_file(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "val" / "images" / "val_1.JPEG").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"val_1.JPEG: not a readable image"):
        vision.tiny_imagenet(tmp_path)
    (tmp_path / "val" / "images" / "val_1.JPEG").unlink()
    with pytest.raises(DataError, match=r"val_1.JPEG: missing, but"):
        vision.tiny_imagenet(tmp_path)
