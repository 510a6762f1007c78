"""The numerics id changes with everything it names and with nothing else (property P8)."""

import pytest

from relay.kernels import canon
from relay.kernels.numerics import numerics_id

PARTS = {**canon.parts(), "instructions": "fma", "kv": "float32", "probe": "00ff"}


def test_the_id_is_short_hex_and_independent_of_order() -> None:
    name = numerics_id(PARTS)
    assert len(name) == 16
    assert int(name, 16) >= 0
    assert name == numerics_id(dict(reversed(PARTS.items())))


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_part_changes_the_id(part: str) -> None:
    assert numerics_id({**PARTS, part: PARTS[part] + "1"}) != numerics_id(PARTS)
    assert numerics_id({name: value for name, value in PARTS.items() if name != part}) != numerics_id(PARTS)


def test_one_probe_bit_changes_the_id() -> None:
    names = {numerics_id({**PARTS, "probe": f"{0x00FF ^ (1 << bit):04x}"}) for bit in range(16)}
    assert len(names | {numerics_id(PARTS)}) == 17


def test_borders_between_names_and_values_matter() -> None:
    assert numerics_id({"ab": "c"}) != numerics_id({"a": "bc"})
    assert numerics_id({"a": "b", "c": "d"}) != numerics_id({"a": "d", "c": "b"})
    with pytest.raises(ValueError, match="at least one"):
        numerics_id({})


CONSTANTS = [name for name in vars(canon) if name.isupper()]


@pytest.mark.parametrize("constant", CONSTANTS)
def test_every_canonical_constant_is_named(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_id(canon.parts())
    value = getattr(canon, constant)
    if isinstance(value, tuple):
        value = (*value[:-1], value[-1] * 2)
    else:
        value *= 2
    monkeypatch.setattr(canon, constant, value)
    assert numerics_id(canon.parts()) != before
