"""Frames of the control protocol: whole ones come out as they went in, damaged ones end the connection instead of meaning
something else."""

import struct
import zlib

import pytest

from relay.protocol.framing import MAX_FRAME_BYTES, FrameDecoder, FramingError, encode
from relay.protocol.messages import EngineToGateway, TokenEntry, Tokens

TOKENS = Tokens([TokenEntry(7, 0, 1, 12, [4711, 33], logprobs=[(-0.25, [(4711, -0.25)]), (-1.5, [])])])
OTHER = Tokens([TokenEntry(8, 0, 0, 0, [1])])


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_messages_survive_any_cutting(step):
    wire = encode(TOKENS) + encode(OTHER) + encode(TOKENS)
    decoder = FrameDecoder(EngineToGateway)
    found = []
    for start in range(0, len(wire), step):
        found += decoder.feed(wire[start : start + step])
    assert found == [TOKENS, OTHER, TOKENS]


def test_no_flipped_bit_is_read_as_a_message_or_waited_out():
    """The checksum of TCP lets one damaged segment of some 65,000 through; a token id would be another one then."""
    wire = encode(TOKENS)
    for bit in range(8 * len(wire)):
        damaged = bytearray(wire)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FramingError):
            FrameDecoder(EngineToGateway).feed(damaged)


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_an_oversized_frame_is_refused_by_its_header_alone(size):
    header = struct.pack("<III", size, size ^ 0xFFFFFFFF, 0)
    with pytest.raises(FramingError, match="over the limit"):
        FrameDecoder(EngineToGateway).feed(header)


def test_a_stranger_is_refused_by_its_first_bytes():
    with pytest.raises(FramingError):
        FrameDecoder(EngineToGateway).feed(b"GET / HTTP/1.1\r\n"[:8])
    with pytest.raises(FramingError):
        FrameDecoder(EngineToGateway).feed(b"GET ")
    with pytest.raises(FramingError, match="over the limit of 50"):
        FrameDecoder(EngineToGateway, limit=50).feed(encode(Tokens([TokenEntry(1, 0, 0, 0, list(range(60)))]))[:4])


def test_a_message_nested_too_deeply_is_a_bad_frame():
    payload = b"\x82\xa4type\xa6tokens\xa1z" + b"\x91" * 60_000
    header = struct.pack("<III", len(payload), len(payload) ^ 0xFFFFFFFF, zlib.crc32(payload))
    with pytest.raises(FramingError, match="recursion"):
        FrameDecoder(EngineToGateway).feed(header + payload)
