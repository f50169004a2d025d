"""Text between <think> and </think>, apart from the answer. Where a prompt ends inside, the output begins there."""

from __future__ import annotations

from typing import NamedTuple

from perdure.server.tools.base import overlap

BEGIN, END = "<think>", "</think>"


class Split(NamedTuple):
    """One of the two is empty."""

    reasoning: str
    content: str


def begins_inside(prompt_text: str) -> bool:
    return prompt_text.rfind(BEGIN) > prompt_text.rfind(END)


class ThinkSplitter:
    """Only the beginning of an output may be reasoning. Space next to the marks is dropped."""

    def __init__(self, is_inside: bool) -> None:
        self._left = ""
        self._state = "inside" if is_inside else "before"
        self._strips = is_inside
        """Whether space at the beginning of what comes is dropped."""

    def push(self, text: str) -> list[Split]:
        self._left += text
        found: list[Split] = []
        if self._state == "before":
            self._begin()
        if self._state == "inside":
            self._think(found)
        if self._state == "after":
            self._answer(found)
        return found

    def end(self) -> list[Split]:
        left, self._left = self._left, ""
        if self._strips:
            left = left.lstrip()
        if not left:
            return []
        return [Split(left, "") if self._state == "inside" else Split("", left)]

    def _begin(self) -> None:
        text = self._left.lstrip()
        if text.startswith(BEGIN):
            self._left, self._state, self._strips = text[len(BEGIN) :], "inside", True
        elif text and overlap(text, BEGIN) != len(text):
            self._state = "after"

    def _think(self, found: list[Split]) -> None:
        self._strip()
        reasoning, mark, rest = self._left.partition(END)
        if mark:
            certain, self._left, self._state, self._strips = reasoning.rstrip(), rest, "after", True
        else:
            certain = reasoning[: len(reasoning) - overlap(reasoning, END)].rstrip()
            self._left = reasoning[len(certain) :]
        if certain:
            found.append(Split(certain, ""))

    def _answer(self, found: list[Split]) -> None:
        self._strip()
        if self._left:
            found.append(Split("", self._left))
            self._left = ""

    def _strip(self) -> None:
        if self._strips:
            self._left = self._left.lstrip()
            self._strips = not self._left
