"""Compressed changes: what comes back, what is kept for later, and that nothing is lost between the two."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedel.core.compression import compress, compress_update, num_bytes, restore, restored
from fedel.errors import UpdateRefused
from fedel.types import Change, ModelSpec, Patch, Report, Role, SentUpdate, TensorSpec, Update, UploadSettings

FP16, INT8 = UploadSettings("fp16"), UploadSettings("int8")
TOPK, FEW = UploadSettings("topk", 0.1), UploadSettings("topk", 0.01)
LOSSY = [FP16, INT8, TOPK, FEW]
REPORT = Report("a", 0, 1, 1, 1.0, 0.0)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
changes = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40), elements=finite
)
uploads = st.sampled_from([*LOSSY, UploadSettings("topk", 1.0), UploadSettings("none")])


@settings(deadline=None)
@given(uploads, changes)
def test_any_change_comes_back_near(upload, change):
    data = compress(upload, change)
    assert num_bytes(upload, change.size) == data.nbytes
    assert data.tobytes() == compress(upload, change.copy()).tobytes()
    back, flat = restore(upload, change.size, data), change.reshape(-1).astype(np.float64)
    assert (np.float32, flat.shape) == (back.dtype, back.shape)
    assert np.isfinite(back).all()
    left, largest = np.abs(flat - back), np.abs(flat).max(initial=0)
    if upload.compression == "fp16":
        assert (
            left <= np.maximum(2.0**-11 * np.abs(flat), 2.0**-25) + np.maximum(np.abs(flat) - 65504, 0)
        ).all()
    elif upload.compression == "int8":
        assert (left <= 0.5001 * largest / 127 + 1e-44 * 127).all()
    elif upload.compression == "topk":
        assert ((back == 0) | (left == 0)).all()
        kept = min(flat.size, max(1, int(np.ceil(upload.share * flat.size))))
        assert left.max(initial=0) <= np.sort(np.abs(flat))[::-1][kept - 1 : kept].max(initial=0)
    else:
        assert flat.tobytes() == back.astype(np.float64).tobytes()


@pytest.mark.parametrize("upload", LOSSY, ids=str)
def test_the_largest_float_comes_back(upload):
    largest = np.full(3, np.finfo(np.float32).max, np.float32)
    assert np.isfinite(restore(upload, 3, compress(upload, largest))).all()


def test_of_equal_changes_the_first_are_sent():
    change = np.array([1, -2, 2, -2, 2, 0, 1, 1, 1, 1], np.float32)
    data = compress(UploadSettings("topk", 0.3), change)
    assert [0, -2, 2, -2, 0, 0, 0, 0, 0, 0] == restore(UploadSettings("topk", 0.3), 10, data).tolist()


@pytest.mark.parametrize("upload", LOSSY, ids=str)
def test_bytes_that_nobody_compressed_are_refused(upload):
    data = compress(upload, np.linspace(-1, 1, 1000, dtype=np.float32))
    for wrong in (data[:-1], np.append(data, data[-1:])):
        with pytest.raises(UpdateRefused, match="are no change of 1000 values"):
            restore(upload, 1000, wrong)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a_scale_is_a_size(scale):
    data = np.append(np.array([scale], "<f4").view(np.uint8), np.ones(3, np.uint8))
    with pytest.raises(UpdateRefused, match="the scale of its change"):
        restore(INT8, 3, data)


def test_places_are_in_the_tensor_each_once():
    good = compress(FEW, np.arange(1000, dtype=np.float32))
    for places in (
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 1000],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 8],
        [9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
    ):
        wrong = np.append(np.array(places, "<u4").view(np.uint8), good[40:])
        with pytest.raises(UpdateRefused, match="in order"):
            restore(FEW, 1000, wrong)
    bitmap = compress(TOPK, np.arange(100, dtype=np.float32))
    bitmap[0] ^= 0x80
    with pytest.raises(UpdateRefused, match="11 places, not 10"):
        restore(TOPK, 100, bitmap)


# Updates

SPEC = ModelSpec(
    "toy",
    ("one",),
    (TensorSpec("w", 1, (40, 30)), TensorSpec("b", 1, (30,)), TensorSpec("s", 1, (30,), Role.BUFFER)),
)
WHOLE = {"w": None, "b": None}
PARTS = {
    "prefix": (slice(0, 20), slice(0, 11)),
    "grid": np.ix_([3, 1, 30], [0, 29, 5]),
    "bitmap": np.random.default_rng(3).random((40, 30)) < 0.4,
}


def normal(seed, shape, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def model():
    return {t.name: normal(i, t.shape) for i, t in enumerate(SPEC.tensors)}


def trained(old, where, seed):
    """Values as a round of training may leave them."""
    patches = {}
    for name, place in where.items():
        part = old[name] if place is None else old[name][place]
        patches[name] = Patch(part + normal(seed, part.shape, 0.01), place)
    return Update(patches, REPORT)


@pytest.mark.parametrize("upload", LOSSY, ids=str)
@pytest.mark.parametrize("kind", ["whole", *PARTS])
def test_sent_and_kept_add_up_to_what_was_trained(upload, kind):
    old = model()
    where = {**WHOLE, "w": PARTS.get(kind)}
    total, received = {n: np.zeros(old[n].shape) for n in where}, {n: np.zeros(old[n].shape) for n in where}
    residuals = {}
    for seed in range(10):
        update = trained(old, where if seed % 2 == 0 else {"b": None}, seed)
        sent, residuals = compress_update(upload, SPEC, update, old, residuals)
        assert all(isinstance(patch, Change) for patch in sent.patches.values())
        for name, patch in restored(upload, sent, old).patches.items():
            at = ... if patch.where is None else patch.where
            total[name][at] += update.patches[name].values - old[name][at]
            received[name][at] += patch.values - old[name][at]
    for name in where:
        assert residuals[name].shape == old[name].shape
        np.testing.assert_allclose(total[name], received[name] + residuals[name], atol=1e-5)
        assert np.abs(total[name] - received[name]).max() > 0


def test_what_is_not_trained_keeps_its_residual():
    old = model()
    _, first = compress_update(TOPK, SPEC, trained(old, WHOLE, 1), old, {})
    _, second = compress_update(TOPK, SPEC, trained(old, {"w": None}, 2), old, first)
    assert second["b"] is first["b"]
    assert second["w"].tobytes() != first["w"].tobytes()
    part = {"w": PARTS["prefix"]}
    _, third = compress_update(TOPK, SPEC, trained(old, part, 3), old, second)
    changed = third["w"] != second["w"]
    assert changed[:20, :11].any()
    assert not changed[20:].any()
    assert not changed[:, 11:].any()


@pytest.mark.parametrize("upload", LOSSY, ids=str)
def test_statistics_and_what_is_not_finite_are_sent_as_they_are(upload):
    old = model()
    update = trained(old, {"w": None, "b": None, "s": None}, 1)
    update.patches["b"].values[3] = np.nan
    sent, residuals = compress_update(upload, SPEC, update, old, {})
    assert isinstance(sent.patches["w"], Change)
    assert (sent.patches["b"], sent.patches["s"]) == (update.patches["b"], update.patches["s"])
    assert {"w"} == residuals.keys()


def test_without_compression_nothing_is_kept():
    old, update = model(), trained(model(), WHOLE, 1)
    sent, residuals = compress_update(UploadSettings(), SPEC, update, old, {})
    assert (SentUpdate(update.patches, REPORT), {}) == (sent, residuals)
    assert dict(restored(UploadSettings(), sent, {}).patches) == update.patches
