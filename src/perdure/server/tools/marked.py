"""Calls between <tool_call> and </tool_call>, with text before, between and after. Space next to a call is dropped."""

from __future__ import annotations

from collections.abc import Callable

from perdure.server.tools.base import Called, Piece, Said, overlap

BEGIN, END = "<tool_call>", "</tool_call>"

ReadCall = Callable[[str], tuple[str, str] | None]
"""Name and arguments of what stands between the marks; None = it is no call."""


class MarkedParser:
    def __init__(self, read_call: ReadCall) -> None:
        self._read_call = read_call
        self._left = ""
        """Not given out: it may begin a mark, be space before one, or be a call that goes on."""
        self._space = ""
        """What stood before the call that goes on."""
        self._is_inside = False
        self._is_after_call = False
        self._num_calls = 0

    def push(self, text: str) -> list[Piece]:
        self._left += text
        found: list[Piece] = []
        while (END if self._is_inside else BEGIN) in self._left:
            self._pass_mark(found)
        if not self._is_inside:
            self._strip_after_call()
            certain = self._left[: len(self._left) - overlap(self._left, BEGIN)].rstrip()
            self._say(found, certain)
            self._left = self._left[len(certain) :]
        return found

    def end(self) -> list[Piece]:
        found: list[Piece] = []
        if self._is_inside:
            self._take_call(found, self._left, "")  # the end of the output may stand in place of the mark
        else:
            self._strip_after_call()
            self._say(found, self._left)
        self._left = ""
        return found

    def _pass_mark(self, found: list[Piece]) -> None:
        if self._is_inside:
            inside, _, self._left = self._left.partition(END)
            self._take_call(found, inside, END)
        else:
            self._strip_after_call()
            before, _, self._left = self._left.partition(BEGIN)
            self._say(found, before.rstrip())
            self._space = before[len(before.rstrip()) :]
        self._is_inside = not self._is_inside

    def _take_call(self, found: list[Piece], inside: str, end: str) -> None:
        call = self._read_call(inside)
        self._is_after_call = call is not None
        if call is None:
            self._say(found, f"{self._space}{BEGIN}{inside}{end}")
        else:
            found.append(Called(self._num_calls, *call))
            self._num_calls += 1

    def _strip_after_call(self) -> None:
        if self._is_after_call:
            self._left = self._left.lstrip()
            self._is_after_call = not self._left

    def _say(self, found: list[Piece], text: str) -> None:
        if text:
            found.append(Said(text))
