"""Builds the C kernels once where they are missing or older than their sources."""

import pytest

from relay.kernels.cpu import build


def _is_current(isa: str) -> bool:
    """Looked up in the file: a library once loaded stays the one that this process gets for its path."""
    path = build.library_path(isa)
    return path.exists() and build.source_digest().encode() in path.read_bytes()


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_built() -> None:
    stale = [isa for isa in build.variants() if not _is_current(isa)]
    if stale:
        build.build(only=stale)
