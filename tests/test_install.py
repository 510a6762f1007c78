"""The base install brings no torch and no transformers and stays under 200 MB."""

from importlib import metadata

import pytest

packaging_requirements = pytest.importorskip("packaging.requirements")

LIMIT_BYTES = 200_000_000


def base_closure() -> dict[str, metadata.Distribution]:
    """Distributions a plain ``pip install relay-serving`` brings, by walking requirements without extras."""
    try:
        root = metadata.distribution("relay-serving")
    except metadata.PackageNotFoundError:
        pytest.skip("relay-serving is not installed here (run through make test)")
    found: dict[str, metadata.Distribution] = {}
    waiting = [(root, frozenset[str]())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        dist, extras = waiting.pop()
        name = dist.metadata["Name"].lower().replace("_", "-")
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found[name] = dist
        for text in dist.requires or []:
            requirement = packaging_requirements.Requirement(text)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": extra}) for extra in (extras or {""})):
                continue
            waiting.append((metadata.distribution(requirement.name), frozenset(requirement.extras)))
    return found


def test_base_install_is_torch_free_and_small() -> None:
    closure = base_closure()
    heavy = {name for name in closure if name in {"torch", "transformers", "triton"} or name.startswith("nvidia-")}
    assert not heavy
    assert {"numpy", "msgspec", "starlette", "tokenizers"} <= set(closure)
    size = sum(
        path.stat().st_size
        for dist in closure.values()
        for file in dist.files or []
        if (path := file.locate()).is_file()  # type: ignore[union-attr, attr-defined]
    )
    assert size < LIMIT_BYTES, f"base install is {size / 1e6:.0f} MB"
