"""What every endpoint needs: the gateway, the tokenizer, the limits, and the identity of answers."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from relay.api.detokenizer import Detokenizer, TokenTexts
from relay.api.errors import ApiError, context_length_exceeded
from relay.api.metrics import ApiMetrics
from relay.api.prompts import Prompt
from relay.api.resume import Resume
from relay.api.tokenization import TokenizerPool
from relay.api.types import Envelope, GenerationRequest, Usage
from relay.api.validation import ApiLimits
from relay.control.contract import Gateway, Submission
from relay.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from relay.api.answer import Answer

_encode = msgspec.json.Encoder().encode


class Tokenizer(TokenTexts, Protocol):
    """The model's tokenizer; thread-safe (``relay.models.tokenizer.Tokenizer``)."""

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...


class ChatTemplate(Protocol):
    """Renders a conversation; thread-safe. Raises ValueError where the template refuses it."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str: ...


class Identity:
    """``id``, ``object``, ``created``, ``model`` and ``system_fingerprint`` of one answer, and everything encoded with them."""

    mark = "\x00relay text\x00"  # stands for a chunk's text while its frame is encoded

    def __init__(self, prefix: str, kind: str, model: str, resume: Resume) -> None:
        """Whoever computes the first token names the fingerprint: ``numerics_id`` is set before anything is encoded."""
        self.id = f"{prefix}-{resume.of('id', 0, 16).hex() if resume.digest else secrets.token_hex(16)}"
        self.kind = kind
        self._created = int(time.time())
        self._model = model
        self.numerics_id = ""

    def encode(
        self,
        choices: list[Any],
        usage: Usage | msgspec.UnsetType | None,
        prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        """One answer or chunk as JSON."""
        return _encode(
            Envelope(
                self.id,
                self.kind,
                self._created,
                self._model,
                self.numerics_id,
                choices,
                usage,
                prompt_token_ids,
            )
        )

    def text_frame(self, choice: Any, usage: msgspec.UnsetType | None) -> tuple[bytes, bytes]:
        """The bytes around the text of a chunk whose text is ``mark``."""
        before, found, after = self.encode([choice], usage).rpartition(_encode(self.mark))
        assert found
        return before, after


class Context:
    """Shared by the endpoints of one app."""

    def __init__(
        self,
        gateway: Gateway,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        served_names: Sequence[str],
        limits: ApiLimits,
        seed: int | None = None,
    ) -> None:
        """``seed`` makes the seeds of requests without one repeatable: they are drawn in order of admission."""
        self.gateway = gateway
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.served_names = tuple(served_names)
        self.limits = limits
        self.detokenizer = Detokenizer(tokenizer)
        self.pool = TokenizerPool(limits)
        self.metrics = ApiMetrics(self.served_names[0])
        bits = secrets.randbits if seed is None else random.Random(seed).getrandbits
        self._draw_seed = partial(bits, 64)
        self.running: dict[bytes, Answer] = {}  # by digest of an idempotent request: the newest connection of each

    def identity(self, prefix: str, kind: str, model: str | None, resume: Resume) -> Identity:
        return Identity(prefix, kind, model or self.served_names[0], resume)

    def seed(self, resume: Resume, prompt: int) -> int:
        """For a prompt that names none: the same whenever and wherever the same request is sent again."""
        return resume.seed(prompt) if resume.digest else self._draw_seed()

    def submission(
        self, request: GenerationRequest, ids: list[int], params: SamplingParams, n: int, resume: Resume, prompt: int
    ) -> Submission:
        return Submission(
            ids,
            params,
            n,
            request.cache_salt or "",
            bool(request.relay_capture),
            resume_key=resume.resume_key(self.gateway.model.model_digest, prompt),
            returns=resume.consumed is not None,
            numerics_id=resume.numerics_id,
        )

    async def encode_prompts(self, prompts: list[Prompt], add_special: bool, param: str) -> list[list[int]]:
        """Token ids of each prompt, texts tokenized in a thread. Raises ApiError for a text that cannot fit the context."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_size(prompt, param)
        if not any(isinstance(prompt, str) for prompt in prompts):
            return [prompt for prompt in prompts if not isinstance(prompt, str)]

        def work() -> list[list[int]]:
            context = self.gateway.model.max_model_len
            tokenized = []
            for prompt in prompts:
                ids = self.tokenizer.encode(prompt, add_special) if isinstance(prompt, str) else prompt
                if len(ids) > context:  # the others need not be tokenized any more
                    raise context_length_exceeded(context, len(ids), 0, param)
                tokenized.append(ids)
            return tokenized

        return await self.pool.run(work)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of complete token ids."""
        decoder = self.detokenizer.decoder()
        return "".join([decoder.step(token_id) for token_id in ids]) + decoder.flush()

    def check_size(self, text: str, param: str) -> None:
        """Raises ApiError for a text far too long for the context, before it is tokenized."""
        context = self.gateway.model.max_model_len
        most = context * self.limits.prompt_bytes_per_token
        if len(text) <= most // 4:
            return
        size = len(text.encode())
        if size > most:
            raise ApiError(
                f"This model's maximum context length is {context} tokens. However, your prompt is {size} bytes long, "
                f"which cannot be {context} tokens (over {self.limits.prompt_bytes_per_token} bytes each). "
                "Please reduce the length of the prompt.",
                param=param,
                code="context_length_exceeded",
            )
