"""Builds the C kernels once where they are missing or older than their sources."""

import ctypes

import pytest

from relay.kernels.cpu import build


def _is_current(isa: str) -> bool:
    path = build.library_path(isa)
    if not path.exists():
        return False
    function = ctypes.CDLL(str(path)).relay_source_digest
    function.restype = ctypes.c_char_p
    return bool(function().decode() == build.source_digest())


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_built() -> None:
    stale = [isa for isa in build.variants() if not _is_current(isa)]
    if stale:
        build.build(only=stale)
