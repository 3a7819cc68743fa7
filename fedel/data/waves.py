"""Reads sound files; turns waves into log-mel images in training, augmented as in FedScale's benchmark."""

from __future__ import annotations

import wave
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedel.data.melspec import RATE, log_mel, stft
from fedel.data.transforms import shift_frames
from fedel.errors import DataError
from fedel.types import Array


def read_wav(path: Path, expected_rate: int) -> Array:
    """Read the samples of a 16-bit mono file as int16."""
    try:
        with wave.open(str(path), "rb") as file:
            rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError, OSError, RuntimeError) as problem:
        raise DataError(f"{path}: not a readable wav file ({problem}); unpack the archive again") from problem
    if (rate, width, channels) != (expected_rate, 2, 1):
        raise DataError(
            f"{path}: {rate} Hz, {8 * width} bit, {channels} channels; must be {expected_rate} Hz, 16 bit, mono"
        )
    return np.frombuffer(raw[: len(raw) // 2 * 2], "<i2").astype(np.int16)


def one_second(samples: Array) -> Array:
    """Cut, or padded with silence at the end, to one second at 16 kHz."""
    out = np.zeros(RATE, samples.dtype)
    out[: min(RATE, len(samples))] = samples[:RATE]
    return out


def upsample(samples: Array, factor: int) -> Array:
    """Band-limited resampling of int16 to a whole multiple of the rate."""
    spectrum = np.fft.rfft(samples.astype(np.float64))
    longer = np.fft.irfft(spectrum, len(samples) * factor) * factor
    return np.rint(longer).clip(-32768, 32767).astype(np.int16)


@dataclass(frozen=True)
class Waves:
    """Waves (N, samples) of int16 to log-mel images (N, 1, 32, 32) in decibels scaled by mean and std.

    Each step of the augmentation is applied to a clip with probability 1/2. Loudness matters only if noise is
    mixed in, because decibels are relative to the loudest point.
    """

    mean: float = 0.0
    std: float = 1.0
    augment: bool = True
    shift: int = 8
    """Frames."""
    speed: float = 0.2
    """Maximum change of speed and pitch by resampling; 0.2 is 20 % faster or slower."""
    stretch: float = 0.2
    """Maximum change of speed at the same pitch, by a phase vocoder."""
    noise_share: float = 0.45
    noise: Array = field(default_factory=lambda: np.zeros((0, RATE), np.int16), compare=False, repr=False)
    """Background recordings, (M, samples) of int16, all of the same length, at least one second."""

    def __call__(self, x: Array, y: Array, rng: np.random.Generator | None) -> tuple[Array, Array]:
        waves = x.astype(np.float64) / 32768.0
        spectra = stft(waves) if rng is None or not self.augment else self._augmented(waves, rng)
        image = (log_mel(spectra)[:, None] - self.mean) / self.std
        return image.astype(np.float32), y.astype(np.int64)

    def _augmented(self, waves: Array, rng: np.random.Generator) -> Array:
        count = len(waves)
        waves = waves * np.where(_half(count, rng), rng.uniform(0.7, 1.1, count), 1.0)[:, None]
        speed = np.where(_half(count, rng), rng.uniform(-self.speed, self.speed, count), 0.0)
        spectra = stft(change_speed(waves, 1.0 + speed))
        rates = 1.0 + np.where(_half(count, rng), rng.uniform(-self.stretch, self.stretch, count), 0.0)
        steps = np.where(_half(count, rng), rng.integers(-self.shift, self.shift + 1, count), 0)
        num_frames = spectra.shape[2]
        # Extra room for the longer, slower clips, until the shift decides which frames remain.
        spectra = shift_frames(stretch(spectra, rates, num_frames + self.shift), steps)[..., :num_frames]
        if len(self.noise) == 0:
            return spectra
        share = np.where(_half(count, rng), rng.uniform(0.0, self.noise_share, count), 0.0)[:, None, None]
        mixed: Array = spectra * (1.0 - share) + stft(self._background(count, rng)) * share
        return mixed

    def _background(self, count: int, rng: np.random.Generator) -> Array:
        rows = rng.integers(0, len(self.noise), count)
        starts = rng.integers(0, self.noise.shape[1] - RATE + 1, count)
        cut: Array = self.noise[rows[:, None], starts[:, None] + np.arange(RATE)] / 32768.0
        return cut


def _half(count: int, rng: np.random.Generator) -> Array:
    return rng.random(count) < 0.5


def change_speed(waves: Array, factors: Array) -> Array:
    """Each wave played ``factor`` times as fast (the pitch changes), linearly interpolated; then silence."""
    length = waves.shape[1]
    position = np.arange(length) * factors[:, None]
    before = np.minimum(position.astype(np.int64), length - 2)
    part = np.minimum(position - before, 1.0)
    rows = np.arange(len(waves))[:, None]
    moved = waves[rows, before] * (1.0 - part) + waves[rows, before + 1] * part
    return np.where(position <= length - 1, moved, 0.0)


def stretch(spectra: Array, rates: Array, num_frames: int) -> Array:
    """Spectra (N, bins, frames), each played ``rate`` times as fast at the same pitch (a phase vocoder), cut or
    padded with silence to ``num_frames``."""
    frames = spectra.shape[2]
    out = np.zeros((*spectra.shape[:2], num_frames), spectra.dtype)
    out[..., :frames] = spectra[..., :num_frames]
    for clip in np.flatnonzero(rates != 1.0):
        position = np.arange(num_frames) * rates[clip]
        position = position[position < frames]
        out[clip] = 0.0
        out[clip, :, : len(position)] = _vocoder(spectra[clip], position)
    return out


def _vocoder(spectrum: Array, position: Array) -> Array:
    """The spectrum (bins, frames) read at each position: loudness between its two frames, and a phase that
    turns from each position to the next as it does from frame to frame there."""
    # Frames are one hop apart before and after, so the phase needs no unwrapping: full turns do not matter.
    before = position.astype(np.int64)
    padded = np.pad(spectrum, ((0, 0), (0, 1)))
    first, second = padded[:, before], padded[:, before + 1]
    part = position - before
    loudness = np.abs(first) * (1.0 - part) + np.abs(second) * part
    phase = np.cumprod(np.hstack([_direction(first[:, :1]), _direction(second * first.conj())[:, :-1]]), axis=1)
    stretched: Array = loudness * phase
    return stretched


def _direction(numbers: Array) -> Array:
    """Complex numbers scaled to length 1; zero becomes 1."""
    length = np.abs(numbers)
    return np.where(length > 0, numbers, 1.0) / np.where(length > 0, length, 1.0)
