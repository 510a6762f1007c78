"""Text to token ids and back: a thin, thread-safe face of ``tokenizers.Tokenizer``."""

import re

import msgspec
from tokenizers import Tokenizer as Backend

from relay.errors import CorruptModelError


class TokenizeError(ValueError):
    """The text cannot be tokenized: it is not Unicode (a lone surrogate)."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Decoder(msgspec.Struct):
    type: str
    decoders: list["_Decoder"] = []


class _Document(msgspec.Struct):
    """The parts of tokenizer.json read here; the rest is skipped without being built."""

    added_tokens: list[_AddedToken] = []
    decoder: _Decoder | None = None


class Tokenizer:
    """One model's tokenizer. Every method may be called from any thread."""

    def __init__(self, json: str, where: str = "tokenizer.json") -> None:
        """``json`` is a tokenizer.json; ``where`` is named in errors. Raises CorruptModelError."""
        if not json:
            raise CorruptModelError(f"{where}: the model has no tokenizer.json")
        try:
            self._backend = Backend.from_str(json)
            document = msgspec.json.decode(json, type=_Document)
        except Exception as error:  # the backend raises plain Exception for every kind of bad file
            raise CorruptModelError(f"{where}: not a usable tokenizer ({error})") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._added = {token.id: token.content.encode() for token in document.added_tokens}
        self.special_ids = frozenset(token.id for token in document.added_tokens if token.special)
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self._byte_level = _is_byte_level(document.decoder, where)
        self._bytes: dict[int, bytes] = dict(self._added)

    @property
    def byte_level(self) -> bool:
        """Whether text is the concatenation of ``token_bytes`` read as UTF-8."""
        return self._byte_level

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special`` adds what the tokenizer puts around a prompt (BOS). Raises TokenizeError."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenizeError("the text holds a lone surrogate, which is not Unicode") from error

    def decode(self, token_ids: list[int], skip_special: bool = True) -> str:
        """The text of a whole sequence, nothing cleaned up; incomplete UTF-8 becomes U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, as UTF-8 that may end inside a character. An id outside the vocabulary adds nothing."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            found = b"" if token is None else self._to_bytes(token)
            self._bytes[token_id] = found
        return found

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _to_bytes(self, token: str) -> bytes:
        if self._byte_level:
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
            return token.encode()
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


def _is_byte_level(decoder: _Decoder | None, where: str) -> bool:
    """True for byte-level BPE, False for pieces with ▁ and byte fallback. Raises CorruptModelError for any other kind."""
    kinds = set()
    if decoder is not None:
        kinds = {decoder.type, *(inner.type for inner in decoder.decoders)} - {"Sequence"}
    if "ByteLevel" in kinds:
        return True
    if kinds and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return False
    raise CorruptModelError(
        f"{where}: decoder {sorted(kinds)} is not served (byte-level BPE and SentencePiece-like are)"
    )


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies: itself where printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
