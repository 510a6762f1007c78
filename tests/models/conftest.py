"""The default model for tests that need the real one: from the cache, or fetched once; skipped by name where neither can be."""

import os
from pathlib import Path

import pytest

from relay.errors import ModelNotFoundError
from relay.models.catalogue import ALIASES
from relay.models.store import LoadedModel, default_cache_dir, open_model


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    try:
        return open_model("smollm2", cache_dir=default_cache_dir(os.environ))
    except ModelNotFoundError as error:
        pytest.skip(f"smollm2 is not on this machine and cannot be fetched: {error}")


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2: LoadedModel) -> Path:
    path = default_cache_dir(os.environ) / "files" / ALIASES["smollm2"].file_name
    if not path.exists():
        pytest.skip(f"{path} was removed; 'relay model rm smollm2' and a new pull bring it back")
    return path


@pytest.fixture(scope="session")
def cpu_kernels() -> None:
    """The C kernels of this machine's best instruction set, compiled here if the install did not."""
    from relay.errors import StartupError
    from relay.kernels.cpu import build, library

    isa = library.choose(None)
    try:
        library.load(isa)
    except StartupError:
        build.build(only=[isa])
        library.load(isa)
