import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.transfer.checksum import crc32c
from relay.transfer.frame import (
    FLAG_EMPTY,
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_KV_BYTES,
    Abort,
    Credit,
    FrameError,
    Handoff,
    Header,
    Hello,
    Kind,
    Probe,
    decode_payload,
    encode_payload,
    parse,
    seal,
    seal_over,
    verify,
)

KV = Header(Kind.KV, 0x0102030405060708, 9, 2, 29, 0, 3, 512, 4, 0, 16, 3)
KV_PAYLOAD = bytes(range(16))
GOLDEN = {
    "kv": (
        KV,
        KV_PAYLOAD,
        "524c4b56" "03" "02" "0000" "0807060504030201" "0900000000000000" "02000000" "1d000200" "0000" "0300"
        "00020000" "04000000" "10000000",
    ),
    "handoff": (
        Header(Kind.HANDOFF, 7, 1, 1, first_token=64, token_count=0, flags=FLAG_EMPTY, payload_bytes=0),
        b"",
        "524c4b56" "03" "03" "0100" "0700000000000000" "0100000000000000" "01000000" "00000000" "0000" "0000"
        "40000000" "00000000" "00000000",
    ),
    "credit": (
        Header(Kind.CREDIT, 1, 2, 3, payload_bytes=19),
        encode_payload(Credit(1 << 20)),
        "524c4b56" "03" "06" "0000" "0100000000000000" "0200000000000000" "03000000" "00000000" "0000" "0000"
        "00000000" "00000000" "13000000",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    header, payload, expected = GOLDEN[name]
    raw = seal(header, payload, crc32c)
    assert raw[:-8].hex() == expected
    assert int.from_bytes(raw[-8:-4], "little") == crc32c(payload)
    assert int.from_bytes(raw[-4:], "little") == crc32c(raw[:-4])
    assert parse(raw, crc32c) == (header, crc32c(payload))
    assert seal_over(header, crc32c(payload), crc32c) == raw
    verify(payload, crc32c(payload), crc32c)


def test_the_page_shows_the_golden_handoff():
    page = (Path(__file__).parent.parent.parent / "docs" / "wire-protocol.md").read_text()
    shown = re.search(r"^524c4b56[0-9a-f ]*$", page, re.MULTILINE)
    raw = seal(*GOLDEN["handoff"][:2], crc32c)
    assert shown is not None
    assert shown[0].replace(" ", "") == raw[:-4].hex()
    assert f"header of {HEADER_BYTES} bytes" in page


def test_golden_payloads():
    """Field names are the wire: renaming one breaks peers of another version."""
    assert encode_payload(Abort("x")).hex() == "81a6726561736f6ea178"
    assert encode_payload(Credit(5)).hex() == "81ac62797465735f636f7069656405"
    assert encode_payload(Probe(5)).hex() == "81aa62797465735f73656e7405"
    handoff = Handoff(token_id=3, logprob=-0.5, top=[(3, -0.5)], cached_tokens=16, logit_digest=b"\1")
    assert decode_payload(encode_payload(handoff), Handoff) == handoff
    assert encode_payload(handoff)[:11].hex() == "85a8746f6b656e5f696403"


headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    transfer=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**64 - 1),
    attempt=st.integers(0, 2**32 - 1),
    layer=st.integers(0, 2**16 - 1),
    first_head=st.integers(0, 2**16 - 1),
    head_count=st.integers(0, 2**16 - 1),
    first_token=st.integers(0, 2**32 - 1),
    token_count=st.integers(0, 2**32 - 1),
    flags=st.sampled_from([0, FLAG_EMPTY]),
    layers=st.integers(1, 2**16),
)


@settings(deadline=None)
@given(headers)
def test_every_header_survives(header):
    raw = seal(header, b"", crc32c)
    assert len(raw) == HEADER_BYTES
    assert parse(raw, crc32c) == (header, 0)


@settings(deadline=None)
@given(st.integers(0, HEADER_BYTES + len(KV_PAYLOAD) - 1), st.integers(0, 7))
def test_one_flipped_bit_is_seen(position, bit):
    raw = bytearray(seal(KV, KV_PAYLOAD, crc32c) + KV_PAYLOAD)
    raw[position] ^= 1 << bit
    with pytest.raises(FrameError):
        open_frame(bytes(raw))


def open_frame(raw):
    _, expected = parse(raw[:HEADER_BYTES], crc32c)
    verify(raw[HEADER_BYTES:], expected, crc32c)


@settings(deadline=None)
@given(st.binary(max_size=HEADER_BYTES + 8))
def test_noise_is_an_error_and_nothing_else(noise):
    with pytest.raises(FrameError):
        parse(noise, crc32c)


@pytest.mark.parametrize(
    ("kind", "limit"), [(Kind.KV, MAX_KV_BYTES), (Kind.HELLO, MAX_CONTROL_BYTES), (Kind.ABORT, MAX_CONTROL_BYTES)]
)
def test_oversized_payload_is_refused_by_its_header_alone(kind, limit):
    def header(size):
        return seal_over(Header(kind, payload_bytes=size), 0, crc32c)

    assert parse(header(limit), crc32c)[0].payload_bytes == limit
    with pytest.raises(FrameError, match="over the limit"):
        parse(header(limit + 1), crc32c)


def test_unknown_kind_flags_version_and_short_header():
    good = seal(KV, KV_PAYLOAD, crc32c)
    for offset, value, text in ((0, 0x53, "magic"), (4, 1, "version"), (5, 99, "kind"), (6, 0x80, "flags")):
        raw = bytearray(good)
        raw[offset] = value
        raw[-4:] = crc32c(raw[:-4]).to_bytes(4, "little")
        with pytest.raises(FrameError, match=text):
            parse(raw, crc32c)
    with pytest.raises(FrameError, match="55 bytes"):
        parse(good[:-1], crc32c)


def test_seal_refuses_what_parse_would():
    with pytest.raises(FrameError, match="out of range"):
        seal(Header(Kind.KV, layer=2**32), b"", crc32c)
    with pytest.raises(FrameError, match="header says"):
        seal(KV, b"", crc32c)
    with pytest.raises(FrameError, match="over the limit"):
        encode_payload(Abort("x" * MAX_CONTROL_BYTES))


@pytest.mark.parametrize("kind", [Hello, Handoff, Abort, Credit, Probe])
@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", b"\x81\xa6reason\x05"])
def test_bad_control_payload(kind, raw):
    with pytest.raises(FrameError, match=kind.__name__):
        decode_payload(raw, kind)


@pytest.mark.parametrize("kind", [Hello, Handoff, Abort, Credit, Probe])
def test_a_payload_nested_too_deeply_is_a_bad_payload(kind):
    """Any stranger may send one, as the first frame; the interpreter's own limit must not end the engine."""
    raw = b"\x81\xa1z" + b"\x91" * (MAX_CONTROL_BYTES - 4) + b"\x01"
    assert len(raw) == MAX_CONTROL_BYTES
    with pytest.raises(FrameError, match=kind.__name__):
        decode_payload(raw, kind)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (Handoff, "token_id", -1),
        (Handoff, "token_id", 1 << 31),
        (Credit, "bytes_copied", -1),
        (Probe, "bytes_sent", -1),
    ],
)
def test_numbers_no_engine_could_have_meant(kind, field, value):
    with pytest.raises(FrameError, match=field):
        decode_payload(msgspec.msgpack.encode({field: value}), kind)
