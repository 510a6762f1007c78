"""The sizes a scheduler and its runner are built for."""

from dataclasses import dataclass

from relay.protocol.block_hash import UNIT_TOKENS


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one engine. None of them may change a bit of the output.

    ``growth_tokens``: how many tokens beyond its present length a sequence is expected to need when it is admitted (at most
    what ``max_tokens`` leaves it); more means fewer preemptions, fewer sequences at once.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    max_model_len: int
    growth_tokens: int = 128
    max_num_waiting: int = 4096

    def __post_init__(self) -> None:
        if self.block_size <= 0 or self.block_size % UNIT_TOKENS:
            raise ValueError(f"block_size {self.block_size} is not a positive multiple of {UNIT_TOKENS}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_blocks", "max_model_len", "max_num_waiting"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.growth_tokens < 0:
            raise ValueError(f"growth_tokens must not be negative, not {self.growth_tokens}")

    @property
    def num_seats(self) -> int:
        """Sequences that hold a slot or a reservation at once: every one of them can decode in one step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_blocks_per_seq(self) -> int:
        return self.blocks_for(self.max_model_len)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)
