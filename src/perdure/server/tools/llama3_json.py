"""Llama 3's convention: the whole output is a call, {"name": ..., "parameters": {...}}, or several with `;` between."""

from __future__ import annotations

from perdure.server.tools.base import Called, Piece, Said, call_of, json_value, overlap

TAG = "<|python_tag|>"


class Llama3JsonParser:
    """From where the output is no call any more, all of it is text."""

    def __init__(self) -> None:
        self._left = ""
        self._num_calls = 0
        self._is_text = False

    def push(self, text: str) -> list[Piece]:
        self._left += text
        found: list[Piece] = []
        while not self._is_text and self._take_call(found):
            pass
        if self._is_text and self._left:
            found.append(Said(self._left))
            self._left = ""
        return found

    def end(self) -> list[Piece]:
        """A call that is not whole is text; space or a `;` behind the last is nothing."""
        left, self._left = self._left, ""
        is_nothing = not left or (self._num_calls and not left.strip(" \t\r\n;"))
        return [] if is_nothing else [Said(left)]

    def _take_call(self, found: list[Piece]) -> bool:
        """The next call, if it is whole. Decides whether what comes can still be one."""
        start = self._begin()
        if start is None:
            return False
        value = json_value(self._left, start)
        if value is None:
            return False
        call = call_of(value[0], ("parameters", "arguments"))
        if call is None:
            self._is_text = True
            return False
        found.append(Called(self._num_calls, *call))
        self._num_calls += 1
        self._left = self._left[value[1] :]
        return True

    def _begin(self) -> int | None:
        """Where the object begins; None = it has not come, or there is none."""
        separators = " \t\r\n;" if self._num_calls else " \t\r\n"
        rest = self._left.lstrip(separators)
        if rest.startswith(TAG):
            rest = rest[len(TAG) :].lstrip()
        if rest.startswith("{"):
            return len(self._left) - len(rest)
        if rest and overlap(rest, TAG) != len(rest):
            self._is_text = True
        return None
