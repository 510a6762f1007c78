"""What a planted bug is: a patch of one attribute of a production class or module for the length of a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mutant:
    """``change(original)`` returns what takes the place of ``owner.attribute``. ``breaks``: the invariant it is against."""

    name: str
    breaks: str
    owner: Any  # a class or a module
    attribute: str
    change: Callable[[Any], Any]

    @property
    def place(self) -> str:
        """Where it is planted, for documentation."""
        owner = getattr(self.owner, "__qualname__", None)
        module = self.owner.__module__ if owner else self.owner.__name__
        path = module.removeprefix("relay.").replace(".", "/")
        return f"{path}.py: {owner}.{self.attribute}" if owner else f"{path}.py: {self.attribute}"


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The bug is there inside the block."""
    original = mutant.owner.__dict__[mutant.attribute]
    changed: Any = mutant.change(original.__func__ if isinstance(original, staticmethod) else original)
    setattr(mutant.owner, mutant.attribute, staticmethod(changed) if isinstance(original, staticmethod) else changed)
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.attribute, original)


def nothing(original: Any) -> Any:
    """The line is deleted."""
    return lambda *arguments, **keywords: None
