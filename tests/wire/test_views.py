import time

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from fedel.v1.aggregator_pb2 import GetModelResponse, ModelContent, PutUpdateRequest, UpdateHeader
from fedel.v1.model_pb2 import Chunk
from fedel.wire.views import UploadPiece, model_message, model_piece, upload_message


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=70_000))
def test_a_chunk_is_read_as_protobuf_reads_it(offset, data):
    piece = upload_message(PutUpdateRequest(chunk=Chunk(offset=offset, data=data)).SerializeToString())
    assert isinstance(piece, UploadPiece)
    assert (offset, data) == (piece.chunk.offset, bytes(piece.chunk.data))


def test_everything_else_is_left_to_protobuf():
    unusual = [
        PutUpdateRequest(header=UpdateHeader(run="run")),
        PutUpdateRequest(chunk=Chunk(offset=3)),
        PutUpdateRequest(),
    ]
    for message in unusual:
        assert message == upload_message(message.SerializeToString())


def test_fields_in_another_order_are_left_to_protobuf():
    swapped = b"\x12\x02ab" + b"\x08\x05"
    message = upload_message(b"\x12" + bytes([len(swapped)]) + swapped)
    assert PutUpdateRequest(chunk=Chunk(offset=5, data=b"ab")) == message


@settings(deadline=None)
@given(st.binary(max_size=30))
def test_no_bytes_are_read_otherwise_than_protobuf_reads_them(noise):
    try:
        expected = PutUpdateRequest.FromString(noise).chunk
    except Exception as error:
        expected = type(error)
    try:
        chunk = upload_message(noise).chunk
        actual = Chunk(offset=chunk.offset, data=bytes(chunk.data))
    except Exception as error:
        actual = type(error)
    assert expected == actual


@pytest.mark.parametrize("start", [b"\x12", b"\x12\x80\x80\x80\x01\x08", b"\x12\x80\x80\x80\x01\x12"])
def test_a_number_without_an_end_is_refused_at_once(start):
    message = start + b"\xff" * 4_000_000
    begin = time.perf_counter()
    with pytest.raises(DecodeError):
        upload_message(message)
    assert time.perf_counter() - begin < 0.1


@pytest.mark.parametrize(
    "offset", [b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x02", b"\xff" * 9 + b"\x7f", b"\xff" * 10]
)
def test_a_number_at_its_limit_is_read_as_protobuf_reads_it(offset):
    chunk = b"\x08" + offset + b"\x12\x01a"
    message = b"\x12" + bytes([len(chunk)]) + chunk
    try:
        expected = PutUpdateRequest.FromString(message).chunk.offset
    except DecodeError:
        with pytest.raises(DecodeError):
            upload_message(message)
    else:
        assert expected == upload_message(message).chunk.offset


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.binary(max_size=70_000))
def test_a_piece_of_a_model_is_written_as_protobuf_reads_it(offset, data):
    expected = GetModelResponse(chunk=Chunk(offset=offset, data=data))
    assert expected == GetModelResponse.FromString(model_message(model_piece(offset, data)))


def test_other_messages_of_a_download_are_left_to_protobuf():
    content = GetModelResponse(content=ModelContent(version=3))
    assert content == GetModelResponse.FromString(model_message(content))
