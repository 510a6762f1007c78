"""Which block holds which prefix of tokens.

A prefix is named by the chained unit hash at its end (``protocol/block_hash.py``), which covers salt, namespace and every
token before. A block of several units is found by the hash of its last unit; its other units are known too, so that
the start of a block can be copied for a sequence that parts inside it. Tokens are compared on every hit.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """The content of one published block."""

    parent: bytes  # hash of the unit before the block (the root hash for a first block)
    hashes: tuple[bytes, ...]  # of its units
    token_ids: list[int]


class PrefixCache:
    """Published blocks by unit hash. At most one block a whole-block hash: a second block of equal content stays private."""

    def __init__(self) -> None:
        self._blocks: dict[int, CachedBlock] = {}
        self._units: dict[bytes, list[int]] = {}  # unit hash → published blocks that hold the unit
        self._changes: dict[bytes, bool] = {}  # net change since the last ``changes``: True added, False removed

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def lookup(self, parent: bytes, unit_hash: bytes, token_ids: Sequence[int]) -> int | None:
        """The block whose last unit is ``unit_hash`` and whose tokens are ``token_ids``; None if there is none."""
        blocks = self._units.get(unit_hash)
        if blocks is None:
            return None
        block = blocks[0]
        known = self._blocks[block]
        if known.token_ids != token_ids or known.parent != parent:
            return None
        return block

    def lookup_start(self, parent: bytes, hashes: Sequence[bytes], token_ids: Sequence[int]) -> tuple[int, int] | None:
        """(block, n): a block after ``parent`` whose first n > 0 tokens are those of ``token_ids``, n a multiple of the unit.

        ``hashes`` are the units wanted, ``token_ids`` their tokens; the longest start wins.
        """
        unit = len(token_ids) // len(hashes) if hashes else 0
        for count in range(len(hashes), 0, -1):
            for block in self._units.get(hashes[count - 1], ()):
                known = self._blocks[block]
                if known.parent == parent and known.token_ids[: count * unit] == token_ids[: count * unit]:
                    return block, count * unit
        return None

    def publish(self, block: int, parent: bytes, hashes: tuple[bytes, ...], token_ids: list[int]) -> bool:
        """Name a computed block's content. False (and nothing changes) if that content has a block already."""
        if hashes[-1] in self._units:
            return False
        self._blocks[block] = CachedBlock(parent, hashes, token_ids)
        for unit_hash in hashes:
            holders = self._units.setdefault(unit_hash, [])
            holders.append(block)
            if len(holders) == 1:
                self._change(unit_hash, True)
        return True

    def forget(self, block: int) -> None:
        """The block's content is about to be overwritten."""
        for unit_hash in self._blocks.pop(block).hashes:
            holders = self._units[unit_hash]
            holders.remove(block)
            if not holders:
                del self._units[unit_hash]
                self._change(unit_hash, False)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """(added, removed) unit hashes since the last call; one that came and went is in neither."""
        changes, self._changes = self._changes, {}
        return [h for h, added in changes.items() if added], [h for h, added in changes.items() if not added]

    def unit_hashes(self) -> list[bytes]:
        """All unit hashes held, for a reset of the router's view."""
        return list(self._units)

    def _change(self, unit_hash: bytes, added: bool) -> None:
        if self._changes.pop(unit_hash, None) is None:
            self._changes[unit_hash] = added

    def check(self) -> None:
        """Assert that blocks and units name each other."""
        if not self._blocks and not self._units:
            return
        named = {(h, block) for block, known in self._blocks.items() for h in known.hashes}
        listed = {(h, block) for h, blocks in self._units.items() for block in blocks}
        assert named == listed, "blocks and unit hashes differ"
