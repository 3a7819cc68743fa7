"""Real data, where it is at hand: cached by `fedel data get`, or in a directory of archives."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedel.data import load_data, speech
from fedel.data.check import check
from fedel.data.files import data_root
from fedel.data.registry import ENTRIES
from fedel.data.store import get, is_present

pytestmark = pytest.mark.slow
SHARED = Path(os.environ.get("FEDEL_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


def archive(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not in FEDEL_SHARED_DATA")
    return SHARED / name


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_what_was_fetched_is_whole(name: str) -> None:
    if not is_present(name, data_root()):
        pytest.skip(f"{name} is not here; `fedel data get {name}` brings it")
    assert check(name, data_root()).problems == ()


def test_cifar10_is_the_official_one() -> None:
    if not is_present("cifar10", data_root()):
        pytest.skip("cifar10 is not here; `fedel data get cifar10` brings it")
    data = load_data("cifar10")
    assert ([6, 9, 9, 4, 1], [3, 8, 8, 0, 6]) == (data.train.y[:5].tolist(), data.test.y[:5].tolist())
    assert ([59, 62, 63], [158, 112, 49]) == (
        data.train.x[0, :, 0, 0].tolist(),
        data.test.x[0, :, 0, 0].tolist(),
    )
    np.testing.assert_allclose([0.4914, 0.4822, 0.4465], data.train.x.mean((0, 2, 3)) / 255, atol=1e-4)


def test_hash_split_is_the_official_split_of_real_clips(tmp_path: Path) -> None:
    """The sample holds every 85th clip of `bed` of the whole set, in order of file name."""
    sample, whole = archive("speech-commands-v1-sample.tar.xz"), archive("speech_commands_v1_logmel32.npz")
    clips = get("speech-commands", tmp_path, lambda *_: None, source=sample)
    arrays = speech.read_npz(whole, ("y", "split"))
    official = arrays["split"][arrays["y"] == 0][::85][:20].tolist()
    assert official == [speech.hashed_part(p.name) for p in sorted((clips / "bed").iterdir())]
