"""Log-mel against an independent STFT, and the speech formats with sounds written here."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from fedel.data import speech
from fedel.data.melspec import log_mel, mel_filters, stft, to_bytes
from fedel.data.waves import Waves, change_speed, stretch, upsample
from fedel.errors import DataError


def tone(hertz: float, rate: int = 16_000, seconds: float = 1.0) -> np.ndarray:
    return (12_000 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.int16)


def write_wav(path: Path, samples: np.ndarray, rate: int = 16_000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


def test_stft_equals_torch() -> None:
    waves = np.random.default_rng(0).normal(size=(3, 16_000))
    expected = torch.stft(
        torch.from_numpy(waves), 2048, 512, window=torch.hann_window(2048, dtype=torch.float64),
        center=True, pad_mode="reflect", return_complex=True,
    )  # fmt: skip
    np.testing.assert_allclose(expected.numpy(), stft(waves), atol=1e-9)


def test_mel_filters_follow_slaneys_scale() -> None:
    """8 kHz is mel 45.25, so 33 steps of 1.371 mel: 91.4 Hz each up to 1 kHz, then a factor of 1.0989 each."""
    filters = mel_filters()
    peaks = filters.argmax(1) * 16_000 / 2048
    assert filters.shape == (32, 1025)
    np.testing.assert_allclose(91.42 * np.arange(1, 11), peaks[:10], atol=4)
    np.testing.assert_allclose(np.full(20, 1.0989), peaks[12:] / peaks[11:-1], atol=0.01)
    areas = filters.sum(1) * 16_000 / 2048
    np.testing.assert_allclose(np.ones(20), areas[12:], atol=0.02)


def test_a_tone_is_loudest_in_its_band_and_everything_lies_within_80_decibels() -> None:
    decibels = log_mel(stft(tone(2000)[None] / 32768.0))[0]
    assert decibels.shape == (32, 32)
    assert (decibels.max(), decibels.min()) == (0.0, -80.0)
    assert mel_filters()[:, 256].argmax() == decibels.mean(1).argmax()
    assert (0, 255) == (to_bytes(decibels).min(), to_bytes(decibels).max())


def test_upsampling_keeps_the_pitch() -> None:
    np.testing.assert_allclose(tone(440)[100:-100], upsample(tone(440, 8_000), 2)[100:-100], atol=3)


def test_change_of_speed_changes_length_and_pitch() -> None:
    waves = tone(500)[None].astype(float)
    faster = change_speed(waves, np.array([1.25]))[0]
    np.testing.assert_allclose(tone(625)[:12_000], faster[:12_000], atol=100)
    assert not faster[12_801:].any()
    np.testing.assert_array_equal(waves, change_speed(waves, np.array([1.0])))


def heard(spectra: np.ndarray) -> np.ndarray:
    """Samples of one clip's spectrum, by torch."""
    window = torch.hann_window(2048, dtype=torch.float64)
    return torch.istft(torch.from_numpy(spectra), 2048, 512, window=window).numpy()


@pytest.mark.parametrize("rate", [0.8, 0.93, 1.2])
def test_stretch_changes_length_and_keeps_pitch(rate: float) -> None:
    """Half a second of 700 Hz lasts 0.5 / rate seconds, but for half a window on either side of its end."""
    waves = np.pad(tone(700, seconds=0.5), (0, 8_000))[None] / 32768.0
    sound = heard(stretch(stft(waves), np.array([rate]), 40)[0])
    length = int(8_000 / rate)
    inside = sound[1_024 : length - 1_024]
    spectrum = np.abs(np.fft.rfft(inside * np.hanning(len(inside)), 160_000))
    assert 700 == pytest.approx(spectrum.argmax() / 10, abs=1)
    loud = np.abs(sound) > 0.2 * waves.max()
    assert length == pytest.approx(np.flatnonzero(loud)[-1], abs=1_024)


def test_stretch_accumulates_the_phase_of_each_bin_by_its_own_frequency() -> None:
    spectrum = stft(np.random.default_rng(3).normal(size=(1, 16_000)))[0]
    rate, expected = 0.9, 2 * np.pi * 512 * np.arange(1025) / 2048
    phase, wanted = np.angle(spectrum[:, 0]), []
    for position in np.arange(35) * rate:
        k, part = int(position), position % 1
        after = spectrum[:, k + 1] if k < 31 else np.zeros(1025)
        wanted.append(((1 - part) * np.abs(spectrum[:, k]) + part * np.abs(after)) * np.exp(1j * phase))
        deviation = np.angle(after) - np.angle(spectrum[:, k]) - expected
        phase = phase + expected + deviation - 2 * np.pi * np.round(deviation / (2 * np.pi))
    np.testing.assert_allclose(np.stack(wanted, 1), stretch(spectrum[None], np.array([rate]), 35)[0], atol=1e-9)


def test_stretch_by_one_is_the_identity_cut_or_padded() -> None:
    spectra = stft(np.random.default_rng(1).normal(size=(2, 16_000)))
    longer = stretch(spectra, np.ones(2), 40)
    np.testing.assert_array_equal(spectra, longer[..., :32])
    assert not longer[..., 32:].any()
    np.testing.assert_array_equal(spectra[..., :30], stretch(spectra, np.ones(2), 30))
    nearly = stretch(spectra, np.full(2, 1 + 1e-12), 32)
    np.testing.assert_allclose(spectra, nearly, atol=1e-8)


def test_half_of_the_clips_are_stretched_when_training() -> None:
    """Nothing else is switched on, so a clip that is not stretched comes out as it is."""
    x = np.random.default_rng(2).integers(-9_000, 9_000, (64, 16_000), np.int16)
    x[:, 8_000:] = 0
    only = Waves(shift=0, speed=0.0)
    plain, first, same = (only(x, np.zeros(64), rng)[0] for rng in (None, *map(np.random.default_rng, (5, 5))))
    np.testing.assert_array_equal(first, same)
    untouched = np.isclose(plain, first, atol=1e-3).all((1, 2, 3))
    assert 20 < untouched.sum() < 44


def speech_folder(root: Path) -> Path:
    for number, word in enumerate(("yes", "no")):
        for speaker in ("aa01", "bb02", "cc03"):
            for n in range(2):
                write_wav(
                    root / "v1" / word / f"{speaker}_nohash_{n}.wav", tone(500 + 1500 * number, seconds=0.8)
                )
    write_wav(root / "v1" / "_background_noise_" / "hum.wav", tone(60, seconds=2))
    return root


def test_speech_commands_with_the_official_lists(tmp_path: Path) -> None:
    place = speech_folder(tmp_path) / "v1"
    (place / "validation_list.txt").write_text("yes/bb02_nohash_0.wav\nno/bb02_nohash_1.wav\n")
    (place / "testing_list.txt").write_text("yes/cc03_nohash_0.wav\nno/cc03_nohash_1.wav\n")
    data = speech.speech_commands(tmp_path)
    assert ("no", "yes") == data.classes
    assert (8, 2) == (len(data.train), len(data.test))
    assert ("aa01", "bb02", "cc03") == data.user_names
    assert data.test.users is not None
    assert [2, 2] == data.test.users.tolist()
    assert (1, 32, 32) == data.input_shape
    bands = [data.train.x[data.train.y == label].mean((0, 1, 3)).argmax() for label in (0, 1)]
    assert bands[0] > bands[1]


def test_without_lists_the_hash_splits_by_speaker_in_the_documented_shares() -> None:
    parts = {f"{n:08x}": speech.hashed_part(f"yes/{n:08x}_nohash_0.wav") for n in range(4000)}
    shares = np.bincount(list(parts.values())) / 4000
    np.testing.assert_allclose([0.8, 0.1, 0.1], shares, atol=0.02)
    assert all(part == speech.hashed_part(f"no/{name}_nohash_7.wav") for name, part in list(parts.items())[:50])


@pytest.mark.parametrize(
    ("name", "part"),
    [("00176480_nohash_0.wav", 0), ("1a9afd33_nohash_1.wav", 1), ("6b889021_nohash_1.wav", 2)],
)
def test_hash_agrees_with_the_official_split_of_known_clips(name: str, part: int) -> None:
    assert part == speech.hashed_part(name)


def test_waves_are_augmented_in_training_only(tmp_path: Path) -> None:
    place = speech_folder(tmp_path) / "v1"
    (place / "validation_list.txt").write_text("")
    (place / "testing_list.txt").write_text("yes/cc03_nohash_0.wav\n")
    data = speech.speech_commands(tmp_path, waves=True)
    assert isinstance(data.transform, Waves)
    assert data.transform.noise.shape == (1, 32_000)
    rows = np.arange(8)
    plain, again = data.train_batch(rows)[0], data.train_batch(rows)[0]
    first, same, other = (data.train_batch(rows, np.random.default_rng(s))[0] for s in (0, 0, 1))
    np.testing.assert_array_equal(plain, again)
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, plain)
    assert (8, 1, 32, 32) == first.shape
    assert (np.float32, True) == (first.dtype, bool(np.isfinite(first).all()))


def test_kept_log_mel_equals_the_images_made_from_waves(tmp_path: Path) -> None:
    place = speech_folder(tmp_path) / "v1"
    (place / "validation_list.txt").write_text("")
    (place / "testing_list.txt").write_text("yes/cc03_nohash_0.wav\n")
    stored = speech.speech_commands(tmp_path).test.x / 255 * 80 - 80
    made = next(speech.speech_commands(tmp_path, waves=True).test_batches())[0] * 20 - 40
    np.testing.assert_allclose(stored, made, atol=0.17)


@pytest.mark.parametrize("waves", [False, True])
def test_images_are_normalised_or_plain_decibels(tmp_path: Path, waves: bool) -> None:
    place = speech_folder(tmp_path) / "v1"
    (place / "validation_list.txt").write_text("")
    (place / "testing_list.txt").write_text("yes/cc03_nohash_0.wav\n")
    sound = np.pad(tone(500, seconds=0.8), (0, 3_200))[None] / 32768.0
    plain, usual = (speech.speech_commands(tmp_path, waves=waves, normalise=n) for n in (False, True))
    decibels = next(plain.test_batches())[0]
    np.testing.assert_allclose(log_mel(stft(sound))[:, None], decibels, atol=0.17)
    assert (-80.0, 0.0) == pytest.approx((decibels.min(), decibels.max()), abs=1e-4)
    normalised = next(usual.test_batches())[0]
    assert np.abs(normalised).max() < 4
    assert np.corrcoef(decibels.ravel(), normalised.ravel())[0, 1] == pytest.approx(1)


def test_fsdd_names_give_digit_speaker_and_split(tmp_path: Path) -> None:
    for digit in (0, 7):
        for n in (3, 5, 11):
            write_wav(tmp_path / "recordings" / f"{digit}_ann_{n}.wav", tone(400, 8_000, 0.4), 8_000)
    data = speech.spoken_digits_wav(tmp_path)
    assert ([0, 0, 7, 7], [0, 7]) == (data.train.y.tolist(), data.test.y.tolist())
    assert ("ann",) == data.user_names
    write_wav(tmp_path / "recordings" / "hello.wav", tone(400, 8_000), 8_000)
    with pytest.raises(DataError, match=r"hello.wav: the name is not"):
        speech.spoken_digits_wav(tmp_path)


def test_wrong_rate_and_damage_name_the_file(tmp_path: Path) -> None:
    write_wav(tmp_path / "yes" / "aa_nohash_0.wav", tone(400, 8_000), 8_000)
    with pytest.raises(DataError, match=r"aa_nohash_0.wav: 8000 Hz"):
        speech.speech_commands(tmp_path)
    (tmp_path / "yes" / "aa_nohash_0.wav").write_bytes(b"RIFF....")
    with pytest.raises(DataError, match=r"aa_nohash_0.wav: not a readable wav"):
        speech.speech_commands(tmp_path)


def test_ready_log_mel(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (6, 32, 32), np.uint8)
    arrays = {
        "x": x, "y": np.array([0, 1, 0, 1, 0, 1], np.uint8), "words": np.array(["bed", "up"]),
        "speaker": np.array([0, 0, 1, 1, 2, 2], np.uint16), "split": np.array([0, 0, 0, 1, 2, 2], np.uint8),
    }  # fmt: skip
    np.savez(tmp_path / "ready.npz", **arrays)
    data = speech.speech_commands(tmp_path)
    assert (3, 2, ("bed", "up")) == (len(data.train), len(data.test), data.classes)
    np.testing.assert_array_equal(x[:3, None], data.train.x)
    batch = data.train_batch(np.arange(3))[0]
    assert (0.0, 1.0) == pytest.approx((batch.mean(), batch.std()), abs=1e-3)
    plain = speech.speech_commands(tmp_path, normalise=False)
    np.testing.assert_array_equal(data.train.x, plain.train.x)
    np.testing.assert_allclose(x[:3, None] / 255 * 80 - 80, plain.train_batch(np.arange(3))[0], atol=1e-4)
    with pytest.raises(DataError, match="contains no sound"):
        speech.speech_commands(tmp_path, waves=True)
    np.savez(tmp_path / "ready.npz", x=x)
    with pytest.raises(DataError, match="has no array 'y', only x"):
        speech.speech_commands(tmp_path)


def test_mfcc_clips_are_cut_and_padded(tmp_path: Path) -> None:
    lengths = np.array([2, 40] * 10)
    frames = np.repeat(np.arange(1.0, 21.0), lengths)[:, None] * np.ones(13)
    np.savez(tmp_path / "digits.npz", X=frames.astype(np.float32), y=np.arange(20) % 10, lengths=lengths)
    data = speech.spoken_digits_mfcc(tmp_path)
    assert (18, 2, (1, 13, 32)) == (len(data.train), len(data.test), data.input_shape)
    np.testing.assert_allclose([0.01, 0.01, 0.0, 0.0], data.train.x[0, 0, 5, :4], atol=1e-6)
    np.testing.assert_allclose(np.full(32, 0.02), data.train.x[1, 0, 5], atol=1e-6)
