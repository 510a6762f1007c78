"""A tokenizer trained on the spot, a plain chat template, and a gateway whose 'model' maps contexts to tokens by hashing.

The fake model is deterministic and knows nothing of batches: token n+1 is a function of (tokens so far, params, choice), as Relay
promises, so metamorphic checks of the HTTP surface mean something without an engine.
"""

import asyncio
import hashlib
import math
import struct
from dataclasses import dataclass, field, replace

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from relay.control.contract import Delivery, ModelInfo, RequestFailure, Submission, SubmissionRefused, TokenSink
from relay.models.chat_template import ChatTemplate
from relay.models.tokenizer import Tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MULTIBYTE = "🙂🎉 日本語。नमस्ते ≈ç√∫ 👨\u200d👩\u200d👧 Ωμέγα "
WORDS = (
    "Once upon a time there was a small server that could count: one two three four five six seven. The alphabet is A B C D "
    "and def add(a, b): return a plus b; the quick brown fox jumps over the lazy dog while other people write long stories "
    "about rivers, mountains, bread, letters and machines that never sleep but often dream of electric sheep and open windows."
)


def byte_level_tokenizer(vocab_size: int = 1600) -> Tokenizer:
    """Byte-level BPE over a small text: whole words, fragments and single bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    letters = [a + b + c for a in "abcdefghijk" for b in "aeiou" for c in "lmnrst dgk"]
    tokenizer.train_from_iterator([WORDS, WORDS.lower(), *letters, *letters, "日本 日本 日本"], trainer)
    return Tokenizer(tokenizer.to_str())


def sentencepiece_like_tokenizer() -> Tokenizer:
    """Pieces with ▁ and byte fallback, decoded as Llama 2's tokenizer.json does."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "▁a", "b", "c", "llo", "▁▁", "é", "日", "!", "▁the"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(tokenizer.to_str())


CHATML = (
    "{% for m in messages %}{% if m.content == 'refuse this' %}{{ raise_exception('refused by the template') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_template() -> ChatTemplate:
    """ChatML. Refuses a conversation that holds the text 'refuse this'."""
    return ChatTemplate(CHATML, {"eos_token": "<|im_end|>"})


@dataclass
class _Running:
    request: int
    choice: int
    submission: Submission
    sink: TokenSink
    output: list[int] = field(default_factory=list)


class FakeGateway:
    """Implements ``relay.control.contract.Gateway``. One step every ``step_s``: a token for each of ``slots`` choices."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: int = 512,
        step_s: float = 0.0005,
        slots: int = 32,
        queue: int = 4096,
    ) -> None:
        self._info = ModelInfo("fake", "digest-0", "numerics-0", tokenizer.vocab_size, context, 1_700_000_000, (0, 2))
        self._step_s = step_s
        self._slots = slots
        self._queue = queue
        self.numerics_after_submit: str | None = None  # what a first worker, ready only after a request came, names
        self.computes_with = ""  # of new tokens, where that is not what the gateway met first
        self._running: list[_Running] = []
        self._next = 0
        self._ticking = False
        self._multibyte = tokenizer.encode(MULTIBYTE)
        self._plain = [
            i
            for i in range(3, tokenizer.vocab_size)
            if tokenizer.token_bytes(i).isascii() and len(tokenizer.token_bytes(i)) > 1
        ]
        self._high = {i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i).isascii()}
        self.leaving: list[tuple[list[str], bool, bool]] = []
        self.cancelled: list[int] = []
        self.finished_choices: list[tuple[int, int]] = []
        self.submissions: list[Submission] = []
        self.burst = 1  # tokens of one delivery
        self.is_ready = True
        self.is_healthy = (True, "")
        self.fail_after: tuple[int, RequestFailure] | None = None  # (tokens, failure) for every request

    @property
    def model(self) -> ModelInfo:
        return self._info

    def name_numerics(self, numerics_id: str) -> None:
        self._info = replace(self._info, numerics_id=numerics_id)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, submission: Submission, sink: TokenSink) -> int:
        if not self.is_ready:
            raise SubmissionRefused(RequestFailure(503, "no_workers", "No worker is ready.", 2))
        if len(self._running) + submission.n > self._queue:
            raise SubmissionRefused(RequestFailure(429, "queue_full", "Too many requests are queued.", 1))
        self._next += 1
        self.submissions.append(submission)
        if self.numerics_after_submit is not None:
            self.name_numerics(self.numerics_after_submit)
        self._running += [_Running(self._next, choice, submission, sink) for choice in range(submission.n)]
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(self._step_s, self._step)
        return self._next

    def cancel(self, request: int) -> None:
        self.cancelled.append(request)
        self._running = [running for running in self._running if running.request != request]

    def finish_choice(self, request: int, choice: int) -> None:
        self.finished_choices.append((request, choice))
        self._running = [r for r in self._running if (r.request, r.choice) != (request, choice)]

    def leave(self, workers, *, stay_out: bool = False, rolling: bool = False) -> str:
        self.leaving.append((list(workers), stay_out, rolling))
        return "nobody would serve" if "last" in workers else ""

    def ready(self) -> bool:
        return self.is_ready

    def health(self) -> tuple[bool, str]:
        return self.is_healthy

    def status(self) -> dict[str, object]:
        return {"workers": [], "running": len(self._running)}

    def metrics(self) -> list[tuple[str, dict[str, str], float]]:
        return [
            ("vllm:num_requests_running", {"model_name": "fake"}, float(len(self._running))),
            ("relay_requests_resumed_total", {"cause": "connection"}, 3.0),
        ]

    def _step(self) -> None:
        for running in list(self._running[: self._slots]):
            if running in self._running:
                self._advance(running)
        if self._running:
            asyncio.get_running_loop().call_later(self._step_s, self._step)
        else:
            self._ticking = False

    def _advance(self, running: _Running) -> None:
        params = running.submission.params
        if self.fail_after is not None and len(running.output) >= self.fail_after[0]:
            self._running = [r for r in self._running if r.request != running.request]
            running.sink.failed(self.fail_after[1])
            return
        delivery = Delivery(
            running.choice, len(running.output), [], numerics_id=self.computes_with or self._info.numerics_id
        )
        if not running.output:
            delivery.cached_tokens = min(16, len(running.submission.token_ids) - 1) // 16 * 16
        if params.logprobs is not None:
            delivery.logprobs = []
        if running.submission.capture:
            delivery.logit_digests = []
        while len(delivery.token_ids) < self.burst and delivery.finish is None:
            self._add_token(running, delivery)
        if delivery.finish:
            self._running.remove(running)
            if running.submission.capture:
                delivery.kv_digests = [bytes(16)]
        running.sink.tokens(delivery)

    def _add_token(self, running: _Running, delivery: Delivery) -> None:
        params = running.submission.params
        token, logits = self._sample(running)
        running.output.append(token)
        delivery.token_ids.append(token)
        if token in params.eos_token_ids or token in params.stop_token_ids:
            delivery.finish = "stop"
        elif len(running.output) >= params.max_tokens:
            delivery.finish = "length"
        if delivery.logprobs is not None:
            norm = math.log(sum(math.exp(value) for value in logits.values()))
            best = sorted(logits.items(), key=lambda item: (-item[1], item[0]))[: params.logprobs]
            delivery.logprobs.append((logits[token] - norm, [(i, value - norm) for i, value in best]))
        if delivery.logit_digests is not None:
            raw = repr(sorted(logits.items())).encode()
            delivery.logit_digests.append(hashlib.blake2b(raw, digest_size=16).digest())

    def _logits(self, context: list[int], prompt: int) -> dict[int, float]:
        """Raw logits over a few candidates, from a hash of the whole context."""
        digest = hashlib.blake2b(struct.pack(f"<{len(context)}I", *context), digest_size=64).digest()
        if self._high.intersection(context[:prompt]):
            token = self._multibyte[(len(context) - prompt) % len(self._multibyte)]
            return {token: 3.0 + digest[1] / 256, digest[0] + 3: 1.0}
        logits = {}
        for rank in range(12):
            word = int.from_bytes(digest[rank * 4 : rank * 4 + 4], "little")
            logits.setdefault(self._plain[word % len(self._plain)], 2.0 - 0.3 * rank + word / 2**34)
        if digest[63] == 0:
            logits[2] = 5.0
        return logits

    def _sample(self, running: _Running) -> tuple[int, dict[int, float]]:
        params = running.submission.params
        prompt = running.submission.token_ids
        raw = self._logits(prompt + running.output, len(prompt))
        logits = {i: value + params.logit_bias.get(i, 0.0) for i, value in raw.items()}
        for i in logits:
            count = running.output.count(i)
            logits[i] -= params.frequency_penalty * count + params.presence_penalty * bool(count)
        if len(running.output) < params.min_tokens and len(logits) > 1:
            logits = {i: v for i, v in logits.items() if i not in params.eos_token_ids + params.stop_token_ids}
        order = sorted(logits, key=lambda i: (-logits[i], i))
        if params.greedy or params.top_k == 1 or params.top_p < 1e-3:
            return order[0], raw
        best, choice = -math.inf, order[0]
        for i in order[: params.top_k or None]:
            noise = hashlib.blake2b(
                struct.pack("<QIII", params.seed, len(prompt) + len(running.output), running.choice, i), digest_size=8
            ).digest()
            uniform = (int.from_bytes(noise, "little") + 0.5) / 2**64
            score = logits[i] / params.temperature - math.log(-math.log(uniform))
            if score > best:
                best, choice = score, i
        return choice, raw
