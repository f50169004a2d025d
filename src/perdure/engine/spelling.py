"""Ids to text, as they arrive or at once: the same text either way.

- Nearly every tokenizer is one of two: in a byte-level one the letters of a piece stand for bytes; in SentencePiece's a
  piece is text with U+2581 for a space, or one byte as `<0x0A>`, and the space put before a text is taken off again.
  For these `Spelling` knows the bytes of an id. Text is the bytes, joined and decoded; a stream decodes them as they
  come, so what it has given out never changes, and an id costs the same however long the output.
- Bytes that make no character become U+FFFD as in each family's own library: one for as many as could have begun a
  character, in SentencePiece one for each. (The `tokenizers` library gives up a whole run of SentencePiece's bytes for
  one that is wrong, with characters that a stream has long shown. There the text is SentencePiece's own, not that one.)
- Of any other decoder nothing is known: `WindowedText` decodes a short window of the last ids again and again.
- Where an id begins in the text is where its first byte stands, which the bytes after it may decide (`Begins`).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from perdure.core.stopping import Begins, TextCursor

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
_BYTES_OF_PIECES = [{"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP = {"type": "Strip", "content": " ", "stop": 0}
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

    errors: how `bytes.decode` treats what is no character. num_stripped: spaces that a text loses at its beginning, at
    most.
    """

    def __init__(
        self,
        piece_of: Callable[[int], str | None],
        special_ids: Collection[int],
        bytes_of_piece: Callable[[str], bytes],
        errors: str = "replace",
        num_stripped: int = 0,
    ) -> None:
        self._piece_of = piece_of
        self._special = frozenset(special_ids)
        self._bytes_of_piece = bytes_of_piece
        self._known: dict[int, bytes] = {}
        self.errors = errors
        self.num_stripped = num_stripped

    @staticmethod
    def of(inner: Any, special_ids: Collection[int]) -> Spelling | None:
        """Of a tokenizer of the `tokenizers` library, if its decoder is one of the two kinds."""
        steps = _steps(inner.decoder)
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return Spelling(inner.id_to_token, special_ids, byte_level)
        bytes_of_piece = sentencepiece if steps[:1] == [_SPACES] else byte_or_text
        steps = steps[1:] if bytes_of_piece is sentencepiece else steps
        num_stripped = steps[2].pop("start", 0) if steps[2:] else 0
        if steps[:2] == _BYTES_OF_PIECES and steps[2:] in ([], [_STRIP]):
            return Spelling(inner.id_to_token, special_ids, bytes_of_piece, EACH_BYTE, num_stripped)
        return None

    def bytes_of(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            piece = self._piece_of(token_id)
            found = self._known[token_id] = b"" if piece is None else self._bytes_of_piece(piece)
        return found

    def shown_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Those of a special id are none where it is skipped."""
        return b"" if skip_special_tokens and token_id in self._special else self.bytes_of(token_id)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        joined = b"".join([self.shown_bytes(token, skip_special_tokens) for token in token_ids])
        return without_spaces(joined.decode("utf-8", self.errors), self.num_stripped)

    def cursor(self, skip_special_tokens: bool) -> SpelledText:
        return SpelledText(self, skip_special_tokens)


class SpelledText:
    """Text of a known spelling: every character whose last byte has come."""

    def __init__(self, spelling: Spelling, skip_special_tokens: bool) -> None:
        self.begins = Begins()
        self._spelling = spelling
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(spelling.errors)
        self._begun = b""
        """Of a character whose last byte has not come."""
        self._num_chars = 0
        self._num_stripped = spelling.num_stripped
        """Spaces that the text may still lose, until it has begun."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these further ids."""
        return "".join([self._push(token) for token in token_ids])

    def _push(self, token: int) -> str:
        new = self._spelling.shown_bytes(token, self._skip)
        if not new:
            self.begins.add(self._num_chars + self._num_broken(), has_text=False)
            return ""
        first = self._num_chars + self._first_character(new)
        text = self._decoder.decode(new)
        self._begun = self._decoder.getstate()[0] if new[-1] >= 0x80 else b""
        if self._num_stripped and text:
            shown = without_spaces(text, self._num_stripped)
            self._num_stripped = 0 if shown else self._num_stripped - len(text)
            text = shown
        self._num_chars += len(text)
        self.begins.add(first, has_text=bool(text or self._begun))
        return text

    def _num_broken(self) -> int:
        """Characters that the bytes of a begun one are if no further one belongs to it."""
        return len(self._begun) if self._spelling.errors == EACH_BYTE else min(1, len(self._begun))

    def _first_character(self, new: bytes) -> int:
        """In which of the characters to come, counted from the begun one, the first of these bytes stands."""
        if not self._begun or new[0] & 0xC0 != 0x80:
            return self._num_broken()
        together = self._begun + new
        if self._spelling.errors == EACH_BYTE:  # they are one character if all of it comes
            together = together[: _length(together[0])]
            return 0 if _is_begun(together) and len(together) == _length(together[0]) else self._num_broken()
        return 0 if _is_begun(together[: len(self._begun) + 1]) else self._num_broken()


class WindowedText:
    """Text of an unknown decoder, from two decodes of a window: without what is new, and with it.

    What the end of the text may still become is held back. The window loses its beginning where the rest decodes to the
    end of the same text: a decoder that joins words looks at one neighbour, or treats the first id as the first.
    """

    def __init__(self, tokenizer: Decodes, skip_special_tokens: bool) -> None:
        self.begins = Begins()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._passed_over = frozenset(tokenizer.all_special_ids if skip_special_tokens else ())
        self._window: list[int] = []
        self._text = ""
        """The window's."""
        self._num_before = 0
        """Characters before it."""
        self._given = 0
        """Characters of the window's text that were given out."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these further ids."""
        given = []
        for token in token_ids:
            if token in self._passed_over:
                self._add_begin(self._text)
                continue
            self._window.append(token)
            text = self._decode(self._window)
            self._add_begin(text)
            certain = len(text) - min(MOST_UNFINISHED, len(text) - len(text.rstrip(UNFINISHED)))
            if certain > self._given:
                given.append(text[self._given : certain])
                self._given = certain
            if len(self._window) > 2 * WINDOW:
                self._shorten(text)
        return "".join(given)

    def _add_begin(self, text: str) -> None:
        """With a further id the window's text is this."""
        before, self._text = self._text, text
        differ = (at for at, (one, two) in enumerate(zip(before, text, strict=False)) if one != two)
        num_same = len(before) if text.startswith(before) else next(differ, len(text))
        self.begins.add(self._num_before + num_same, has_text=before != text)

    def _shorten(self, text: str) -> None:
        rest = self._window[-WINDOW:]
        end = self._decode(rest)
        lost = len(text) - len(end)
        if end and text.endswith(end) and lost <= self._given:
            self._window, self._text = rest, end
            self._num_before += lost
            self._given -= lost

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip)


def byte_level(piece: str) -> bytes:
    """A piece that holds another letter is no spelling of bytes but text."""
    found = [_BYTE_OF_LETTER.get(letter) for letter in piece]
    spelled = bytes([byte for byte in found if byte is not None])
    return spelled if len(spelled) == len(found) else piece.encode()


def byte_or_text(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.encode()


def sentencepiece(piece: str) -> bytes:
    return byte_or_text(piece.replace(SPACE, " "))


def without_spaces(text: str, most: int) -> str:
    """Without so many spaces at its beginning."""
    return text[min(most, len(text) - len(text.lstrip(" "))) :]


def _is_begun(data: bytes) -> bool:
    """Whether these bytes are one character, or begin one."""
    try:
        return len(codecs.utf_8_decode(data, "strict", False)[0]) <= 1
    except UnicodeDecodeError:
        return False


def _length(first: int) -> int:
    """Of the character that begins with this byte, in bytes."""
    return 2 if first < 0xE0 else 3 if first < 0xF0 else 4


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
