"""Tokenizers from GGUF metadata and from tokenizer.json equal transformers' on over 1,000 lines in over 20 scripts."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from corpus import corpus_lines, phrases
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from relay.errors import CorruptModelError
from relay.models.checkpoint import TokenizerFiles
from relay.models.gguf_tokenizer import tokenizer_files
from relay.models.hf_tokenizer import read_tokenizer_files
from relay.models.store import LoadedModel
from relay.models.tokenizer import TokenizeError, Tokenizer

LINES = corpus_lines()


@pytest.fixture(scope="module")
def vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges) of a byte-level BPE trained on the corpus itself."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        LINES[:400], trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return [*tokens, "<|begin|>", "<|end|>", "<|user def|>"], [" ".join(merge) for merge in model["merges"]]


def from_gguf(vocabulary: tuple[list[str], list[str]], pre: str, **changes: Any) -> TokenizerFiles:
    tokens, merges = vocabulary
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return tokenizer_files(metadata.get, "m.gguf")


def test_corpus_is_as_large_as_it_says() -> None:
    assert len(set(LINES)) > 1000
    assert len(phrases()) > 30


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_round_trip_and_token_bytes(pre: str, vocabulary: tuple[list[str], list[str]]) -> None:
    import unicodedata

    tokenizer = Tokenizer(from_gguf(vocabulary, pre).json)
    for line in LINES:
        ids = tokenizer.encode(line, add_special=False)
        text = unicodedata.normalize("NFC", line) if pre == "qwen2" else line
        assert tokenizer.decode(ids, skip_special=False) == text
        assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == text


def test_smollm_splits_digits(vocabulary: tuple[list[str], list[str]]) -> None:
    smollm, gpt2 = (Tokenizer(from_gguf(vocabulary, pre).json) for pre in ("smollm", "gpt-2"))
    assert [smollm.token(i) for i in smollm.encode("x2024")] == ["x", "2", "0", "2", "4"]
    assert smollm.encode("in 2024") != gpt2.encode("in 2024")


def test_special_tokens(vocabulary: tuple[list[str], list[str]]) -> None:
    tokens, _ = vocabulary
    begin, end, user = (len(tokens) - i for i in (3, 2, 1))
    files = from_gguf(vocabulary, "smollm")
    tokenizer = Tokenizer(files.json)
    assert files.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert tokenizer.special_ids == {begin, end}
    assert tokenizer.encode("<|end|><|user def|>") == [end, user]
    assert tokenizer.decode([end, user, end]) == "<|user def|>"
    assert tokenizer.decode([end], skip_special=False) == "<|end|>"
    assert tokenizer.token_bytes(user) == b"<|user def|>"
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.token_id("<|end|>") == end
    assert tokenizer.token_bytes(len(tokens) + 5) == b""
    assert tokenizer.token(-1) is None


def test_bos_only_where_the_file_asks_for_it(vocabulary: tuple[list[str], list[str]]) -> None:
    begin = len(vocabulary[0]) - 3
    assert Tokenizer(from_gguf(vocabulary, "smollm").json).encode("a")[0] != begin
    with_bos = Tokenizer(from_gguf(vocabulary, "smollm", add_bos_token=True).json)
    assert with_bos.encode("a")[0] == begin
    assert with_bos.encode("a", add_special=False)[0] != begin
    assert Tokenizer(from_gguf(vocabulary, "llama-bpe").json).encode("a")[0] == begin
    assert Tokenizer(from_gguf(vocabulary, "llama-bpe", add_bos_token=False).json).encode("a")[0] != begin


def test_unserved_kinds_are_refused_by_name(vocabulary: tuple[list[str], list[str]]) -> None:
    with pytest.raises(CorruptModelError, match=r"m\.gguf: tokenizer\.ggml\.pre 'tekken' is not served"):
        from_gguf(vocabulary, "tekken")
    with pytest.raises(CorruptModelError, match=r"tokenizer\.ggml\.model 'llama' is not served"):
        from_gguf(vocabulary, "smollm", model="llama")
    with pytest.raises(CorruptModelError, match="must all be there"):
        from_gguf(vocabulary, "smollm", merges=None)
    with pytest.raises(CorruptModelError, match="not a usable tokenizer"):
        Tokenizer("{}")
    with pytest.raises(CorruptModelError, match=r"no tokenizer\.json"):
        Tokenizer("")


def test_lone_surrogate_is_an_error_of_its_own(vocabulary: tuple[list[str], list[str]]) -> None:
    with pytest.raises(TokenizeError):
        Tokenizer(from_gguf(vocabulary, "smollm").json).encode("a\ud800b")


def test_threads(vocabulary: tuple[list[str], list[str]]) -> None:
    tokenizer = Tokenizer(from_gguf(vocabulary, "smollm").json)
    expected = [tokenizer.encode(line) for line in LINES]
    wrong = []

    def check() -> None:
        wrong.extend(line for line, ids in zip(LINES, expected, strict=True) if tokenizer.encode(line) != ids)
        wrong.extend(ids for ids in expected if any(not isinstance(tokenizer.token_bytes(i), bytes) for i in ids))

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_sentencepiece_like_pieces_with_byte_fallback() -> None:
    """The tokenizer.json of older Llama and Mistral models."""
    vocab = {"<unk>": 0, "<0x0A>": 1, "<0xF0>": 2, "▁": 3, "a": 4, "▁a": 5, "b": 6}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "vocab": vocab, "merges": [["▁", "a"]]},
    }
    tokenizer = Tokenizer(json.dumps(document))
    ids = tokenizer.encode("a a\nb")
    assert ids == [5, 5, 1, 6]
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == b" a a\nb"
    assert tokenizer.decode(ids) == "a a\nb"
    assert tokenizer.token_bytes(2) == b"\xf0"
    document["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(CorruptModelError, match="WordPiece"):
        Tokenizer(json.dumps(document))


@pytest.mark.peers
def test_qwen2_kind_equals_transformers_class(vocabulary: tuple[list[str], list[str]]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokens, merges = vocabulary
    plain = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = transformers.Qwen2Tokenizer(vocab=plain, merges=pairs, eos_token="<|end|>", unk_token=None, pad_token=None)
    theirs.add_special_tokens({"additional_special_tokens": ["<|begin|>"]})
    theirs.add_tokens(["<|user def|>"])
    ours = Tokenizer(from_gguf(vocabulary, "qwen2").json)
    for line in LINES:
        assert ours.encode(line) == theirs(line)["input_ids"], line


@pytest.mark.peers
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
def test_tokenizer_json_folder_equals_transformers(
    pre: str, vocabulary: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """A folder read by transformers and by us: ids with and without special tokens, and decoded text."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    files = from_gguf(vocabulary, pre)
    (tmp_path / "tokenizer.json").write_text(files.json)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                **files.special_tokens,
            }
        )
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(files.json)
    for line in LINES:
        for special in (True, False):
            assert ours.encode(line, special) == theirs(line, add_special_tokens=special)["input_ids"], line
        ids = ours.encode(line)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.peers
def test_smollm2_equals_transformers(smollm2: LoadedModel, smollm2_gguf: Path) -> None:
    """transformers' reading of the GGUF, plus the digits rule of SmolLM2's tokenizer.json that its GGUF converter leaves out."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = smollm2.tokenizer
    for line in LINES:
        ids = ours.encode(line)
        assert ids == theirs(line)["input_ids"], line
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids) == line
        assert b"".join(ours.token_bytes(i) for i in ids).decode() == line


@pytest.mark.peers
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_bos_and_eos_settings_equal_transformers(pre: str, settings: dict, vocabulary: tuple, tmp_path: Path) -> None:
    """The template in tokenizer.json wins over tokenizer_config.json's add_bos_token."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    files = from_gguf(vocabulary, pre)
    (tmp_path / "tokenizer.json").write_text(files.json)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.special_tokens, **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(read_tokenizer_files(tmp_path, {}).json)
    for line in LINES[:60]:
        assert ours.encode(line) == theirs(line)["input_ids"]
        assert ours.encode(line, add_special=False) == theirs(line, add_special_tokens=False)["input_ids"]
