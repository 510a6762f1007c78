import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.transfer.checksum import crc32c


def bit_by_bit(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_answers(data, expected):
    assert crc32c(data) == expected


@pytest.mark.parametrize("size", [511, 512, 513, 65535, 65536, 65537, 66048, 131073])
def test_vector_path_equals_bit_by_bit(size):
    data = np.random.default_rng(size).bytes(size)
    assert crc32c(data) == bit_by_bit(data)


@settings(deadline=None)
@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_continues(first, second):
    assert crc32c(memoryview(second), crc32c(first)) == crc32c(first + second)
