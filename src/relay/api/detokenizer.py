"""Token ids → text, one token at a time, equal to the tokenizer's own ``decode`` of all of them.

``Detokenizer`` belongs to the tokenizer and chooses the method once; a ``TokenDecoder`` belongs to one choice. Special tokens
are not part of the text. Text is given out only when no later token can change it; ``flush`` gives what is left at the end
(U+FFFD for an incomplete character, as ``decode`` does).

Byte-level vocabularies (GPT-2's mapping of bytes to printable characters) need no call into the tokenizer: a token is a byte
string and text is their concatenation read as UTF-8. Every other decoder is asked for the text of a short window of
tokens, once with and once without the new ones. There is one difference to their ``decode``: it turns the whole of an
ill-formed run of byte tokens into U+FFFD, here its good characters before the fault stay, because they may be out already.
"""

from codecs import utf_8_decode
from collections.abc import Set
from typing import Protocol

_REPLACEMENT = "\ufffd"


class TokenTexts(Protocol):
    """What is needed of a tokenizer here (``relay.models.tokenizer.Tokenizer``)."""

    @property
    def special_ids(self) -> Set[int]: ...

    @property
    def byte_level(self) -> bool:
        """Text is the concatenation of ``token_bytes`` read as UTF-8."""
        ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: list[int], skip_special: bool = True) -> str: ...


class TokenDecoder(Protocol):
    """The text of one growing list of tokens."""

    def step(self, token_id: int) -> str:
        """Add one token; return the text that became certain, possibly empty."""
        ...

    def flush(self) -> str:
        """No more tokens follow: the text held back."""
        ...


class Detokenizer:
    """Everything about one tokenizer's tokens as text. Tables fill as tokens are met."""

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self.token_bytes = tokenizer.token_bytes
        self._pieces: dict[int, str | bytes] = {}

    def decoder(self) -> TokenDecoder:
        """A decoder for a new choice."""
        return _ByteLevelDecoder(self) if self._tokenizer.byte_level else _WindowDecoder(self._tokenizer)

    def piece(self, token_id: int) -> str | bytes:
        """What a byte-level token adds: text where it is whole characters, else bytes; '' for specials and ids without a token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            raw = b"" if token_id in self._special else self.token_bytes(token_id)
            try:
                piece = raw.decode()
            except UnicodeDecodeError:
                piece = raw
            self._pieces[token_id] = piece
        return piece


class _ByteLevelDecoder:
    """Concatenates byte strings and gives out whole characters."""

    __slots__ = ("_owner", "_pending", "_pieces")

    def __init__(self, owner: Detokenizer) -> None:
        self._owner = owner
        self._pieces = owner._pieces
        self._pending = b""

    def step(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._owner.piece(token_id)
        if isinstance(piece, str):
            if not self._pending or not piece:
                return piece
            piece = piece.encode()
        data = self._pending + piece
        text, consumed = utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text

    def flush(self) -> str:
        text = self._pending.decode(errors="replace")
        self._pending = b""
        return text


class _WindowDecoder:
    """Asks the tokenizer for the text of the last few tokens with and without the new ones and gives out the difference.

    ``_shown`` is where the window's tokens already given out end. A text ending in U+FFFD may be an incomplete character
    and waits. The window moves on only at points where text was given out, so decoders that join or strip at the beginning of
    their input see the same beginning both times.
    """

    __slots__ = ("_prefix", "_shown", "_tokenizer", "_window")

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0
        self._prefix = ""

    def step(self, token_id: int) -> str:
        self._window.append(token_id)
        text: str = self._tokenizer.decode(self._window)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._prefix):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._tokenizer.decode(self._window))

    def _advance(self, text: str) -> str:
        delta = text[len(self._prefix) :]
        del self._window[: self._shown]
        self._shown = len(self._window)
        self._prefix = self._tokenizer.decode(self._window)
        return delta
