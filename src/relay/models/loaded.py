"""An open model, as gateway and workers hold it."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from relay.errors import CorruptModelError
from relay.kernels.program import Program
from relay.models.checkpoint import TokenizerFiles
from relay.models.config import ModelConfig
from relay.models.pack import Pack

if TYPE_CHECKING:
    from relay.models.chat_template import ChatTemplate
    from relay.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """An open model. Texts are decoded when first asked for: workers need none of them."""

    name: str
    pack: Pack
    program: Program

    @property
    def config(self) -> ModelConfig:
        return self.pack.config

    @property
    def digest(self) -> str:
        return self.pack.digest

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may have: the rows of the RoPE tables."""
        return self.pack.config.max_positions

    @cached_property
    def tokenizer_files(self) -> TokenizerFiles:
        return self.pack.tokenizer_files()

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """Raises CorruptModelError if the model has no usable tokenizer."""
        from relay.models.tokenizer import Tokenizer

        return Tokenizer(self.tokenizer_files.json, str(self.pack.path))

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """None if the model has no template. Raises CorruptModelError for one that does not compile."""
        from relay.models.chat_template import ChatTemplate, ChatTemplateError

        files = self.tokenizer_files
        if files.chat_template is None:
            return None
        try:
            return ChatTemplate(files.chat_template, files.special_tokens)
        except ChatTemplateError as error:
            raise CorruptModelError(f"{self.pack.path}: {error}") from error

    @property
    def generation_defaults(self) -> dict[str, object]:
        """generation_config.json of the model, empty if it had none."""
        return self.tokenizer_files.generation
