"""Cluster shapes by name: ``2P+3D`` is two prefill and three decode workers, ``3`` is three workers that do both."""

import re
from dataclasses import dataclass

from relay.errors import UsageError

MAX_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """``prefill`` 0 means colocated: ``decode`` workers of role ``both``, as the flags of ``relay serve`` say it."""

    prefill: int
    decode: int

    @property
    def name(self) -> str:
        return f"{self.prefill}P+{self.decode}D" if self.prefill else str(self.decode)

    @property
    def size(self) -> int:
        return self.prefill + self.decode

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that exist in it."""
        return ("prefill", "decode") if self.prefill else ("both",)

    @property
    def last(self) -> str:
        """The id of its last worker."""
        return f"{'decode' if self.prefill else 'worker'}-{self.decode - 1}"

    @property
    def flags(self) -> list[str]:
        """For ``relay serve``."""
        return ["--prefill", str(self.prefill), "--decode", str(self.decode)]


def parse_shape(text: str) -> Shape:
    """The shape that ``text`` names. Raises UsageError."""
    split = re.fullmatch(r"(\d+)[Pp]\+(\d+)[Dd]", text.strip())
    colocated = re.fullmatch(r"(\d+)", text.strip())
    if split:
        shape = Shape(int(split[1]), int(split[2]))
        valid = shape.prefill >= 1 and shape.decode >= 1
    else:
        shape = Shape(0, int(colocated[1]) if colocated else 0)
        valid = shape.decode >= 1
    if not valid or shape.size > MAX_WORKERS:
        raise UsageError(f"--shape {text!r}: write 2P+3D, or 3 for colocated workers; at most {MAX_WORKERS} in all")
    return shape
