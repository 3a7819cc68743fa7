"""Spoken words: Google Speech Commands (wav folders or ready-made log-mel) and the Free Spoken Digit Dataset.

The official validation clips are not in the training set; the test set is the official one.
"""

from __future__ import annotations

import hashlib
import tokenize
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedel.data.dataset import Dataset, Split
from fedel.data.files import decoded, listed
from fedel.data.lazy import Lazy
from fedel.data.melspec import RATE, TOP_DB, log_mel, stft, to_bytes
from fedel.data.transforms import LogMel, measure, shrunk
from fedel.data.waves import Waves, one_second, read_wav, upsample
from fedel.errors import DataError
from fedel.types import Array

TRAIN, VALIDATION, TEST = 0, 1, 2
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FSDD_RATE = 8_000
_HASH_RANGE = 2**27 - 1
"""Maximum files per class in the official README; the hash of a speaker is taken modulo this plus one."""


def speech_commands(
    folder: Path, *, waves: bool = False, augment: bool = True, normalise: bool = True, size: int = 0
) -> Dataset:
    """One folder of wav files per word, in ``folder`` or one directory deeper; or a ready log-mel ``.npz``.

    With ``waves`` the sound itself is kept (32 kB per clip) and augmented as sound, else as log-mel images.
    Without ``normalise`` the images are in decibels, -80 to 0, as in FedScale's benchmark. ``size`` 16 or 8
    gives smaller images.
    """
    if waves and size:
        raise DataError(f"speech-commands: size = {size} shrinks images; with waves = true there are none")
    ready = listed(folder, "*.npz") if folder.is_dir() else [folder]
    if ready:
        if waves:
            raise DataError(
                f"{ready[0]}: contains no sound, only log-mel; set waves = false or get the wav archive"
            )
        return ready_log_mel(ready[0], augment=augment, normalise=normalise, size=size)
    place = _words_folder(folder)
    words = tuple(p.name for p in listed(place) if p.is_dir() and p.name != "_background_noise_")
    files = [file for word in words for file in listed(place / word, "*.wav")]
    labels = np.array([words.index(f.parent.name) for f in files], np.int64)
    parts = official_split(place, [f.relative_to(place).as_posix() for f in files])
    speakers = [f.name.split("_nohash_")[0] for f in files]
    noise = _background_noise(place / "_background_noise_") if waves else None
    clips = _Clips(place, files, RATE, labels, parts, speakers, waves)
    return _assemble("speech-commands", words, clips, augment, normalise, noise, size)


def _words_folder(folder: Path) -> Path:
    for place in (folder, *(p for p in listed(folder) if p.is_dir())):
        if next(place.glob("*/*.wav"), None):
            return place
    raise DataError(
        f"{folder}: no <word>/*.wav and no .npz found; "
        "run `fedel data get speech-commands --from <archive>` with the official archive"
    )


def official_split(place: Path, names: Sequence[str]) -> Array:
    """0 training, 1 validation, 2 test: by the official lists if they exist, else by the README's hash."""
    lists = [place / "validation_list.txt", place / "testing_list.txt"]
    if all(p.exists() for p in lists):
        validation, testing = (set(p.read_text(encoding="utf-8").split()) for p in lists)
        return np.array([VALIDATION if n in validation else TEST if n in testing else TRAIN for n in names])
    return np.array([hashed_part(name) for name in names])


def hashed_part(name: str, validation_percent: float = 10.0, test_percent: float = 10.0) -> int:
    """The part that a clip belongs to. It depends on the speaker, so a speaker is never in two parts.

    >>> hashed_part("bed/00176480_nohash_0.wav") == hashed_part("zero/00176480_nohash_3.wav")
    True
    """
    speaker = name.rsplit("/", 1)[-1].split("_nohash_")[0]
    number = int(hashlib.sha1(speaker.encode(), usedforsecurity=False).hexdigest(), 16)
    percent = number % (_HASH_RANGE + 1) * (100.0 / _HASH_RANGE)
    if percent < validation_percent:
        return VALIDATION
    return TEST if percent < validation_percent + test_percent else TRAIN


def _background_noise(folder: Path) -> Array | None:
    clips = [read_wav(p, RATE) for p in listed(folder, "*.wav")] if folder.exists() else []
    clips = [c for c in clips if len(c) >= RATE]
    shortest = min((len(c) for c in clips), default=0)
    return np.stack([c[:shortest] for c in clips]) if clips else None


def spoken_digits_wav(
    folder: Path, *, waves: bool = False, augment: bool = True, normalise: bool = True
) -> Dataset:
    """FSDD: ``{digit}_{speaker}_{n}.wav`` at 8 kHz; recordings 0 to 4 of each are the official test set."""
    place = next((p for p in (folder / "recordings", folder) if p.is_dir()), folder)
    files = listed(place, "*.wav")
    if not files:
        raise DataError(f"{place}: no wav files; run `fedel data get fsdd --from <archive>`")
    labels, speakers, numbers = zip(*(_fsdd_name(f) for f in files), strict=True)
    parts = np.array([TEST if n < 5 else TRAIN for n in numbers])
    clips = _Clips(place, files, FSDD_RATE, np.array(labels, np.int64), parts, speakers, waves)
    return _assemble("fsdd", DIGIT_WORDS, clips, augment, normalise, None)


def _fsdd_name(file: Path) -> tuple[int, str, int]:
    match file.stem.split("_"):
        case [digit, speaker, number] if digit.isdecimal() and len(digit) == 1 and number.isdecimal():
            return int(digit), speaker, int(number)
    raise DataError(f"{file}: the name is not {{digit}}_{{speaker}}_{{number}}.wav; remove it or rename it")


@dataclass(frozen=True)
class _Clips:
    place: Path
    files: list[Path]
    rate: int
    labels: Array
    parts: Array
    speakers: Sequence[str]
    waves: bool

    def read(self) -> Mapping[str, Array]:
        return {"x": np.stack([self._read_clip(file) for file in self.files])}

    def _read_clip(self, file: Path) -> Array:
        samples = read_wav(file, self.rate)
        clip = one_second(samples if self.rate == RATE else upsample(samples, RATE // self.rate))
        return clip if self.waves else to_bytes(log_mel(stft(clip[None] / 32768.0)))


def _assemble(
    name: str,
    words: tuple[str, ...],
    clips: _Clips,
    augment: bool,
    normalise: bool,
    noise: Array | None,
    size: int = 0,
) -> Dataset:
    key = "waves" if clips.waves else "logmel32"
    x = decoded(clips.place, key, clips.files, clips.read)["x"]
    if not clips.waves:
        x = shrunk(name, x, size)
    names = tuple(sorted(set(clips.speakers)))
    ids = {speaker: number for number, speaker in enumerate(names)}
    users = np.array([ids[s] for s in clips.speakers])
    train, test = (_part(x, clips.labels, users, clips.parts == which) for which in (TRAIN, TEST))
    if clips.waves:
        mean, std = (-TOP_DB / 2, TOP_DB / 4) if normalise else (0.0, 1.0)
        noise = np.zeros((0, RATE), np.int16) if noise is None else noise
        sound = Waves(mean, std, augment=augment, noise=noise)
        return Dataset(name, "speech", train, test, words, sound, names)
    return Dataset(name, "speech", train, test, words, _images(train.x, augment, normalise), names)


def _images(x: Array | Lazy, augment: bool, normalise: bool) -> LogMel:
    """How bytes become model input: in units of the standard deviation of ``x``, or in decibels."""
    mean, std = measure(x) if normalise else ((1.0,), (1.0 / TOP_DB,))
    return LogMel(mean, std, shift=x.shape[-1] // 4 if augment else 0)


def _part(x: Array, y: Array, users: Array | None, chosen: Array) -> Split:
    return Split(x[chosen], y[chosen], None if users is None else users[chosen])


def ready_log_mel(path: Path, *, augment: bool = True, normalise: bool = True, size: int = 0) -> Dataset:
    """An ``.npz`` with ``x`` (N, 32, 32) uint8, ``y``, ``words``, ``speaker`` and ``split`` (0, 1, 2).

    The bytes of the known file are a fixed scale of power, about 2.5 per decibel with 0 dB at 194, in HTK bands
    over windows of 512 samples. The images that we make from wav files are different, so do not mix the two.
    Without ``normalise`` the bytes 0 to 255 are mapped to -80 to 0 like ours, so a decibel counts as 0.8.
    """
    arrays = read_npz(path, ("x", "y", "words", "speaker", "split"))
    x, y, parts = arrays["x"], arrays["y"], arrays["split"]
    if x.ndim != 3 or x.dtype != np.uint8 or not len(x) == len(y) == len(parts) == len(arrays["speaker"]):
        shapes = {name: a.shape for name, a in arrays.items()}
        raise DataError(
            f"{path}: expected x of uint8 (N, mel, frames) and N of y, speaker, split; found {shapes}"
        )
    x = shrunk("speech-commands", x[:, None], size)
    users = arrays["speaker"].astype(np.int64)
    labels = y.astype(np.int64)
    train, test = (_part(x, labels, users, parts == which) for which in (TRAIN, TEST))
    names = tuple(f"speaker-{n:04d}" for n in range(int(users.max()) + 1))
    words = tuple(str(w) for w in arrays["words"])
    transform = _images(train.x, augment, normalise)
    return Dataset("speech-commands", "speech", train, test, words, transform, names)


def read_npz(path: Path, keys: Sequence[str]) -> dict[str, Array]:
    """Read arrays from an ``.npz`` without unpickling."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [k for k in keys if k not in archive.files]
            if missing:
                raise DataError(f"{path}: has no array {missing[0]!r}, only {', '.join(archive.files)}")
            return {k: archive[k] for k in keys}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, tokenize.TokenError) as problem:
        raise DataError(f"{path}: not a readable .npz ({problem}); get it again") from problem


def spoken_digits_mfcc(folder: Path, *, num_frames: int = 32, augment: bool = True) -> Dataset:
    """FSDD as 13 MFCCs per frame, cut or padded to ``num_frames``; no speakers; every tenth is a test clip."""
    arrays = read_npz(folder / "digits.npz", ("X", "y", "lengths"))
    lengths = arrays["lengths"]
    if lengths.sum() != len(arrays["X"]) or len(lengths) != len(arrays["y"]):
        raise DataError(f"{folder / 'digits.npz'}: lengths do not add up to the frames; get it again")
    starts = np.cumsum(lengths) - lengths
    frame = np.arange(num_frames)
    source = np.minimum(starts[:, None] + frame, len(arrays["X"]) - 1)
    x = np.where((frame < lengths[:, None])[..., None], arrays["X"][source], 0.0)
    x = (x / 100.0).astype(np.float32).transpose(0, 2, 1)[:, None]
    y = arrays["y"].astype(np.int64)
    test = np.arange(len(y)) % 10 == 9
    mean, std = measure(x[~test])
    train = Split(x[~test], y[~test])
    transform = LogMel(mean, std, shift=2 if augment else 0)
    return Dataset("spoken-digits", "speech", train, Split(x[test], y[test]), DIGIT_WORDS, transform)
