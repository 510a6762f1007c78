"""What a model file of any format gives to the packer."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from relay.kernels.packing import MatrixSource
from relay.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """All that concerns text. ``json`` is a tokenizer.json ("" if the model has none).

    ``special_tokens`` maps roles (``bos_token``…) to their text;
    ``generation`` holds generation_config.json's defaults (temperature and so on), empty if the model has none.
    """

    json: str
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    generation: dict[str, object] = field(default_factory=dict)


class Checkpoint(Protocol):
    """An opened model file or folder; tensors are read when asked for, by the names of ``layout.py``'s parts."""

    @property
    def where(self) -> str:
        """The path, for errors."""
        ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> TokenizerFiles: ...

    def matrix(self, name: str) -> MatrixSource:
        """Raises CorruptModelError, naming file and tensor, if it is missing or damaged."""
        ...

    def vector(self, name: str) -> np.ndarray:
        """fp32 [size]; raises as ``matrix``."""
        ...
