"""Ids to text, as they arrive or at once: the same text either way.

- Nearly every tokenizer is one of two: in a byte-level one the letters of a piece stand for bytes; in SentencePiece's a
  piece is text with U+2581 for a space, or one byte as `<0x0A>`, and the space put before a text is taken off again.
  For these `Spelling` knows the bytes of an id. Text is the bytes, joined and decoded; a stream decodes them as they
  come, so what it has given out never changes, and an id costs the same however long the output.
- Bytes that make no character become U+FFFD as in each family's own library: one for as many as could have begun a
  character, in SentencePiece one for each. (The `tokenizers` library gives up a whole run of SentencePiece's bytes for
  one that is wrong, with characters that a stream has long shown. There the text is SentencePiece's own, not that one.)
- Of any other decoder nothing is known: `WindowedText` decodes a short window of the last ids again and again.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from perdure.core.stopping import TextCursor

UNFINISHED = "\ufffd"
"""What decoders put where bytes do not make a character; at the end of a text it may still become one."""

MOST_UNFINISHED = 3
"""Bytes that may still become a character."""

WINDOW = 16
"""Ids that a decoder may need to see before a further one."""

EACH_BYTE = "perdure.each-byte"
codecs.register_error(EACH_BYTE, lambda error: (UNFINISHED * (error.end - error.start), error.end))  # type: ignore[attr-defined]

SPACE = "\u2581"
_SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
_SENTENCEPIECE = [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Decodes(Protocol):
    """What is asked of a tokenizer here. spelling: None = only `decode` knows its text."""

    all_special_ids: tuple[int, ...]

    @property
    def spelling(self) -> Spelling | None: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def text_cursor(tokenizer: Decodes, skip_special_tokens: bool) -> TextCursor:
    """The text of one output that is certain, as its ids arrive."""
    spelling = tokenizer.spelling
    return WindowedText(tokenizer, skip_special_tokens) if spelling is None else spelling.cursor(skip_special_tokens)


class Spelling:
    """The bytes of ids. bytes_of_piece: of a piece of the vocabulary. piece_of: None for an id without one.

    errors: how `bytes.decode` treats what is no character. strips_space: a text loses a space at its beginning.
    """

    def __init__(
        self,
        piece_of: Callable[[int], str | None],
        special_ids: Collection[int],
        bytes_of_piece: Callable[[str], bytes],
        errors: str = "replace",
        strips_space: bool = False,
    ) -> None:
        self._piece_of = piece_of
        self._special = frozenset(special_ids)
        self._bytes_of_piece = bytes_of_piece
        self._known: dict[int, bytes] = {}
        self.errors = errors
        self.strips_space = strips_space

    @staticmethod
    def of(inner: Any, special_ids: Collection[int]) -> Spelling | None:
        """Of a tokenizer of the `tokenizers` library, if its decoder is one of the two kinds."""
        steps = _steps(inner.decoder)
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return Spelling(inner.id_to_token, special_ids, byte_level)
        if steps[:3] == _SENTENCEPIECE and steps[3:] in ([], [_STRIP]):
            return Spelling(inner.id_to_token, special_ids, sentencepiece, EACH_BYTE, len(steps) == 4)
        return None

    def bytes_of(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            piece = self._piece_of(token_id)
            found = self._known[token_id] = b"" if piece is None else self._bytes_of_piece(piece)
        return found

    def joined(self, token_ids: Sequence[int], skip_special_tokens: bool) -> bytes:
        if skip_special_tokens:
            return b"".join([self.bytes_of(token) for token in token_ids if token not in self._special])
        return b"".join([self.bytes_of(token) for token in token_ids])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text = self.joined(token_ids, skip_special_tokens).decode("utf-8", self.errors)
        return text.removeprefix(" ") if self.strips_space else text

    def cursor(self, skip_special_tokens: bool) -> SpelledText:
        return SpelledText(self, skip_special_tokens)


class SpelledText:
    """Text of a known spelling: every character whose last byte has come."""

    def __init__(self, spelling: Spelling, skip_special_tokens: bool) -> None:
        self._spelling = spelling
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(spelling.errors)
        self._strips = spelling.strips_space
        """Whether the text is still to begin, and may lose a space."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these further ids."""
        text = self._decoder.decode(self._spelling.joined(token_ids, self._skip))
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text


class WindowedText:
    """Text of an unknown decoder, from two decodes of a window: without what is new, and with it.

    What the end of the text may still become is held back. The window loses its beginning where the rest decodes to the
    end of the same text: a decoder that joins words looks at one neighbour, or treats the first id as the first.
    """

    def __init__(self, tokenizer: Decodes, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._passed_over = frozenset(tokenizer.all_special_ids if skip_special_tokens else ())
        self._window: list[int] = []
        self._given = 0
        """Characters of the window's text that were given out."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these further ids."""
        given = []
        for token in token_ids:
            if token in self._passed_over:
                continue
            self._window.append(token)
            text = self._decode(self._window)
            certain = len(text) - min(MOST_UNFINISHED, len(text) - len(text.rstrip(UNFINISHED)))
            if certain > self._given:
                given.append(text[self._given : certain])
                self._given = certain
            if len(self._window) > 2 * WINDOW:
                self._shorten(text)
        return "".join(given)

    def _shorten(self, text: str) -> None:
        rest = self._window[-WINDOW:]
        end = self._decode(rest)
        lost = len(text) - len(end)
        if end and text.endswith(end) and lost <= self._given:
            self._window = rest
            self._given -= lost

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip)


def byte_level(piece: str) -> bytes:
    """A piece that holds another letter is no spelling of bytes but text."""
    found = [_BYTE_OF_LETTER.get(letter) for letter in piece]
    spelled = bytes([byte for byte in found if byte is not None])
    return spelled if len(spelled) == len(found) else piece.encode()


def sentencepiece(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()


def _letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the rest come from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_LETTER = _letters()


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """A decoder's steps, as its library writes them."""
    if decoder is None:
        return []
    written: dict[str, Any] = json.loads(decoder.__getstate__())
    return list(written["decoders"]) if written["type"] == "Sequence" else [written]
