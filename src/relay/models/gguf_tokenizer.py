"""The tokenizer in a GGUF file → a tokenizer.json, for the byte-level BPE kinds whose rules are known exactly."""

import json
from collections.abc import Callable
from typing import Any

from relay.errors import CorruptModelError
from relay.models.checkpoint import TokenizerFiles

_CONTROL, _USER_DEFINED, _UNUSED = (
    3,
    4,
    5,
)  # token types; control tokens are invisible in text, user-defined ones visible
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_files(value: Callable[[str], Any], where: str) -> TokenizerFiles:
    """``value`` looks up GGUF metadata, ``where`` is named in errors. Raises CorruptModelError for an unknown kind."""
    model, pre = value("tokenizer.ggml.model"), value("tokenizer.ggml.pre")
    if model != "gpt2":
        raise CorruptModelError(f"{where}: tokenizer.ggml.model {model!r} is not served (gpt2 is)")
    if pre not in _KINDS:
        raise CorruptModelError(f"{where}: tokenizer.ggml.pre {pre!r} is not served ({', '.join(_KINDS)})")
    tokens, types = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = value("tokenizer.ggml.merges")
    if not tokens or not merges or not types or len(types) != len(tokens):
        raise CorruptModelError(f"{where}: tokenizer.ggml.tokens, token_type and merges must all be there")
    normalizer, pre_tokenizer, ignore_merges = _KINDS[pre]()
    bos = value("tokenizer.ggml.bos_token_id")
    add_bos = value("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = _KINDS[pre] is _llama3
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(i, tokens[i], types[i]) for i in range(len(tokens)) if types[i] in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _prepend(tokens[bos], bos) if add_bos and bos is not None else None,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: value(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    return TokenizerFiles(
        json=json.dumps(document, ensure_ascii=False),
        chat_template=value("tokenizer.chat_template"),
        special_tokens={role: tokens[i] for role, i in ids.items() if i is not None and i < len(tokens)},
    )


Rules = tuple[dict[str, Any] | None, dict[str, Any], bool]  # normalizer, pre-tokenizer, whole words before merges


def _smollm() -> Rules:
    digits = {"type": "Digits", "individual_digits": True}
    return None, {"type": "Sequence", "pretokenizers": [digits, _byte_level(True)]}, False


def _gpt2() -> Rules:
    return None, _byte_level(True), False


def _llama3() -> Rules:
    return None, {"type": "Sequence", "pretokenizers": [_split(_LLAMA3_WORDS), _byte_level(False)]}, True


def _qwen2() -> Rules:
    words = {"type": "Sequence", "pretokenizers": [_split(_QWEN2_WORDS), _byte_level(False)]}
    return {"type": "NFC"}, words, False


_KINDS: dict[str, Callable[[], Rules]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _added_token(token_id: int, content: str, kind: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": kind == _CONTROL}


def _prepend(token: str, token_id: int) -> dict[str, Any]:
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    single = [special, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
