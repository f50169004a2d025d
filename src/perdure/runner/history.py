"""`History`: the ids before a token as its logits processors see them: a window into the row's own list, not a copy.

- It reads like a list and cannot be changed; a slice of it, or a sum with another list, is a list of the reader's own.
- The list beneath only grows, and a row that comes anew gets another one: what a history once showed it shows for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload


class History(Sequence[int]):
    """ids[first:end] of a list that is only appended to."""

    __slots__ = ("_end", "_first", "_ids")

    def __init__(self, ids: list[int], first: int, end: int) -> None:
        assert 0 <= first <= end <= len(ids)
        self._ids = ids
        self._first = first
        self._end = end

    def __len__(self) -> int:
        return self._end - self._first

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self._ids[self._first + at] for at in range(*index.indices(len(self)))]
        at = range(self._first, self._end)[index]  # as a list: from the end if negative, IndexError beyond
        return self._ids[at]

    def __iter__(self) -> Iterator[int]:
        return map(self._ids.__getitem__, range(self._first, self._end))

    def __eq__(self, other: object) -> bool:
        """With a list too."""
        if not isinstance(other, (History, list)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[int]) -> list[int]:
        return [*self, *other]

    def __radd__(self, other: Sequence[int]) -> list[int]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))
