import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedel.core.compression import compress
from fedel.errors import UpdateRefused
from fedel.types import Change, ModelSpec, Patch, Role, TensorSpec, UploadSettings
from fedel.wire.payload import check, digest, pack, unpack

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=5)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def tensors(draw):
    """A tensor's shape, and a patch of it of any kind."""
    shape = draw(shapes)
    kind = draw(st.sampled_from(["whole", "prefix", "grid", "bitmap"]))
    if kind == "whole":
        where, size = None, shape
    elif kind == "prefix":
        size = tuple(draw(st.integers(1, n)) for n in shape)
        where = tuple(slice(0, n) for n in size)
    elif kind == "grid":
        axes = [draw(st.lists(st.integers(0, n - 1), min_size=1, unique=True)) for n in shape]
        where, size = np.ix_(*axes), tuple(len(axis) for axis in axes)
    else:
        where = draw(hnp.arrays(bool, shape))
        size = (int(where.sum()),)
    return shape, Patch(draw(hnp.arrays(np.float32, size, elements=finite)), where)


def join(payload, offset=0, chunk_bytes=7):
    """The payload as it would arrive, with the place and size of every piece checked."""
    data = bytearray()
    for chunk in payload.chunks(offset, chunk_bytes):
        assert offset + len(data) == chunk.offset
        assert len(chunk.data) == min(chunk_bytes, payload.num_bytes - chunk.offset)
        data += chunk.data
    return bytes(data)


@settings(deadline=None)
@given(st.lists(tensors(), max_size=4), st.data())
def test_every_kind_of_patch_comes_back_to_the_bit(drawn, data):
    patches = {f"tensor {i}": patch for i, (_, patch) in enumerate(drawn)}
    spec = ModelSpec("toy", ("one",), tuple(TensorSpec(f"tensor {i}", 1, s) for i, (s, _) in enumerate(drawn)))
    payload = pack(patches)
    check(payload.manifest, spec)
    sent = join(payload)
    assert payload.num_bytes == len(sent)
    cut = data.draw(st.integers(0, len(sent)))
    assert sent[cut:] == join(payload, cut)
    position = 0
    for entry in payload.manifest:
        shape = spec.by_name[entry.name].shape
        patch = unpack(entry, sent[position : position + entry.num_bytes], shape)
        position += entry.num_bytes
        assert patches[entry.name].values.tobytes() == patch.values.tobytes()
        expected, actual = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for target, source in ((expected, patches[entry.name]), (actual, patch)):
            target[... if source.where is None else source.where] = source.values
        assert expected.tobytes() == actual.tobytes()


@settings(deadline=None)
@given(tensors(), st.sampled_from(["fp16", "int8", "topk"]))
def test_every_compressed_patch_comes_back_to_the_bit(drawn, compression):
    shape, patch = drawn
    upload = UploadSettings(compression)
    spec = ModelSpec("toy", ("one",), (TensorSpec("a", 1, shape),))
    data = compress(upload, patch.values)
    payload = pack({"a": Change(data, patch.values.shape, patch.where)})
    check(payload.manifest, spec, upload)
    (entry,) = payload.manifest
    back = unpack(entry, join(payload), shape)
    assert isinstance(back, Change)
    assert (patch.values.shape, data.tobytes()) == (back.shape, back.data.tobytes())
    expected, actual = np.zeros(shape, bool), np.zeros(shape, bool)
    for target, source in ((expected, patch), (actual, back)):
        target[... if source.where is None else source.where] = True
    assert np.array_equal(expected, actual)
    with pytest.raises(UpdateRefused) as caught:
        check(payload.manifest, spec)
    assert "compressed" == caught.value.reason


def test_a_compressed_tensor_has_the_bytes_that_its_form_needs():
    spec = ModelSpec("toy", ("one",), (TensorSpec("a", 1, (2, 3)), TensorSpec("mean", 1, (3,), Role.BUFFER)))
    int8 = UploadSettings("int8")
    for name, size, reason in (("a", 9, "size"), ("a", 11, "size"), ("mean", 7, "compressed")):
        shape = spec.by_name[name].shape
        payload = pack({name: Change(np.zeros(size, np.uint8), shape)})
        with pytest.raises(UpdateRefused) as caught:
            check(payload.manifest, spec, int8)
        assert reason == caught.value.reason


def test_two_payloads_have_one_digest_only_if_they_hold_the_same():
    one, other = np.ones(3, np.float32), np.full(3, 2, np.float32)
    assert pack({"a": Patch(one)}).digest == pack({"a": Patch(one.copy())}).digest
    different = [
        {"a": Patch(one)},
        {"a": Patch(other)},
        {"b": Patch(one)},
        {"a": Patch(one.reshape(3, 1))},
        {"a": Patch(one, (slice(0, 3),))},
        {"a": Change(one.view(np.uint8), (3,))},
        {},
    ]
    assert len(different) == len({pack(patches).digest for patches in different})


def spoilt(change):
    entry = pack({"a": Patch(np.ones((2, 3), np.float32))}).manifest[0]
    change(entry)
    return [entry]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda e: setattr(e, "name", "b"), "unknown_tensor"),
        (lambda e: setattr(e, "dtype", 0), "dtype"),
        (lambda e: e.shape.__setitem__(0, 3), "shape"),
        (lambda e: setattr(e, "num_bytes", 23), "size"),
        (lambda e: e.where.prefix.extend([2, 9]), "shape"),
        (lambda e: e.where.prefix.extend([2]), "shape"),
        (lambda e: [e.where.grid.add(indices=[0, 0]), e.where.grid.add(indices=[0, 1, 2])], "shape"),
        (lambda e: [e.where.grid.add(indices=[0, 2]), e.where.grid.add(indices=[0, 1, 2])], "shape"),
        (lambda e: setattr(e.where, "bitmap", True), "shape"),
    ],
)
def test_a_manifest_that_does_not_fit_the_model_is_refused(change, reason):
    spec = ModelSpec("toy", ("one",), (TensorSpec("a", 1, (2, 3)),))
    with pytest.raises(UpdateRefused) as caught:
        check(spoilt(change), spec)
    assert reason == caught.value.reason


def test_a_tensor_twice_in_one_manifest_is_refused():
    spec = ModelSpec("toy", ("one",), (TensorSpec("a", 1, (2, 3)),))
    with pytest.raises(UpdateRefused, match="occurs twice"):
        check(spoilt(lambda e: None) * 2, spec)


def test_damaged_bytes_and_a_bitmap_that_lies_are_refused():
    mask = np.array([True, False, True])
    payload = pack({"a": Patch(np.ones(2, np.float32), mask)})
    data = join(payload)
    with pytest.raises(UpdateRefused, match="damaged"):
        unpack(payload.manifest[0], data[:-1] + b"\1", (3,))
    lying = pack({"a": Patch(np.ones(1, np.float32), mask)})
    with pytest.raises(UpdateRefused, match="does not match"):
        unpack(lying.manifest[0], join(lying), (3,))


def test_the_digest_of_a_manifest_is_that_of_its_payload():
    payload = pack({"a": Patch(np.ones(3, np.float32))})
    assert payload.digest == digest(list(payload.manifest))
