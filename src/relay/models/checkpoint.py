"""What a model file of any format gives to the packer."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from relay.kernels.weights import Encoding
from relay.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class SourceMatrix:
    """One matrix [n, k] as the file stores it, rows in order.

    ``rows``: fp32 / uint16 (BF16 bits) / fp16 [n, k], or for Q8_0 and Q4_1 the raw GGUF blocks as uint8 [n, row bytes].
    """

    encoding: Encoding
    n: int
    k: int
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """All that concerns text: ``json`` is a tokenizer.json; ``special_tokens`` maps roles (``bos_token``…) to their text.

    ``generation`` holds generation_config.json's defaults (temperature and so on), empty if the model has none.
    """

    json: str
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    generation: dict[str, object] = field(default_factory=dict)


class Checkpoint(Protocol):
    """An opened model file or folder; tensors are read when asked for, by the names of ``layout.py``'s parts."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> TokenizerFiles: ...

    def matrix(self, name: str) -> SourceMatrix:
        """Raises CorruptModelError, naming file and tensor, if it is missing or damaged."""
        ...

    def vector(self, name: str) -> np.ndarray:
        """fp32 [size]; raises as ``matrix``."""
        ...
