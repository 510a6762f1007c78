"""Kernels are written for the Triton that the extra ``gpu`` pins; a torch for GPUs that came with peers may bring another."""

import importlib.metadata
from pathlib import Path

import pytest

PINNED = "3.6."
HERE = Path(__file__).parent


def installed() -> str:
    """Triton's version, empty where there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = installed()
    if not found or found.startswith(PINNED):
        return
    other = pytest.mark.skip(reason=f"Triton {found} is installed, the extra gpu pins {PINNED}*")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(other)
