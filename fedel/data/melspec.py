"""Log-mel images of sound in plain numpy, by the recipe of FedScale's speech benchmark.

STFT with a Hann window, centred frames and reflected ends; 32 Slaney mel bands of the power; decibels below
the loudest point, at most 80. One second at 16 kHz becomes 32 x 32.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fedel.types import Array

RATE = 16_000
NUM_FFT = 2048
HOP = 512
NUM_MELS = 32
TOP_DB = 80.0
_LINEAR_HZ, _LINEAR_MELS = 1000.0, 15.0
"""Slaney's scale is linear up to 1 kHz (mel 15) and logarithmic above."""
_LOG_STEP = np.log(6.4) / 27.0


def stft(waves: Array) -> Array:
    """Complex spectra (N, bins, frames) of float waves (N, samples)."""
    padded = np.pad(waves, ((0, 0), (NUM_FFT // 2, NUM_FFT // 2)), mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, NUM_FFT, axis=1)[:, ::HOP]
    spectra = np.fft.rfft(frames * _hann(), axis=2)
    return spectra.transpose(0, 2, 1)


def log_mel(spectra: Array) -> Array:
    """Decibels (N, mel, frames) below the loudest point of each clip, from -80 to 0."""
    power = (np.abs(spectra) ** 2).astype(np.float64)
    mel = np.matmul(mel_filters(), power)
    decibels: Array = 10.0 * np.log10(np.maximum(mel, 1e-10))
    decibels -= decibels.max(axis=(1, 2), keepdims=True)
    return decibels.clip(min=-TOP_DB)


def to_bytes(decibels: Array) -> Array:
    """-80..0 dB as 0..255, in steps of 0.31 dB."""
    return np.rint((decibels + TOP_DB) * (255.0 / TOP_DB)).astype(np.uint8)


@lru_cache(maxsize=1)
def _hann() -> Array:
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(NUM_FFT) / NUM_FFT)


@lru_cache(maxsize=4)
def mel_filters(rate: int = RATE, num_mels: int = NUM_MELS) -> Array:
    """Triangular filters (mel, bins) with unit area in Hz, from 0 to half the sampling rate."""
    edges = _mel_to_hz(np.linspace(0.0, _hz_to_mel(rate / 2), num_mels + 2))
    bins = np.linspace(0.0, rate / 2, NUM_FFT // 2 + 1)
    rising = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    area = 2.0 / (edges[2:] - edges[:-2])
    filters: Array = np.maximum(0.0, np.minimum(rising, falling)) * area[:, None]
    return filters


def _hz_to_mel(hertz: float) -> float:
    if hertz < _LINEAR_HZ:
        return hertz * _LINEAR_MELS / _LINEAR_HZ
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_HZ) / _LOG_STEP)


def _mel_to_hz(mel: Array) -> Array:
    log = _LINEAR_HZ * np.exp(_LOG_STEP * (mel - _LINEAR_MELS))
    return np.where(mel < _LINEAR_MELS, mel * _LINEAR_HZ / _LINEAR_MELS, log)
