"""`TokenScores`: the scores of consecutive tokens, flat inside, the familiar dictionaries only on access.

Entry i holds the chosen token's natural-log probability and rank and, where asked, the best ids with theirs, and those
of a fixed list of ids. Indexing gives `{token_id: Logprob}`: the best first, then the listed ones that are not among
them, then the chosen token if it is not there yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias, overload

import msgspec

from perdure.api.errors import InvalidValue


class Logprob(msgspec.Struct, frozen=True):
    """logprob: natural log. rank: 1 = most likely. decoded_token: the id's own text, if the engine decodes."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Packed: TypeAlias = "array[Any] | memoryview[Any]"


class PackedScores(msgspec.Struct, frozen=True, array_like=True):
    """`TokenScores` as plain bytes, without what its tokens and its request tell: float32 and int32, little-endian, one
    a token, a best pair and a listed id."""

    chosen: bytes
    rank: bytes
    num_top: bytes
    top_ids: bytes
    top_scores: bytes
    listed_ranks: bytes = b""
    listed_scores: bytes = b""

    def __post_init__(self) -> None:
        num_pairs = sum(array("i", self.num_top)) if len(self.num_top) % 4 == 0 else -1
        fits = len(self.chosen) == len(self.rank) == len(self.num_top)
        fits = fits and len(self.listed_ranks) == len(self.listed_scores)
        if not (fits and len(self.top_ids) == len(self.top_scores) == 4 * num_pairs):
            raise InvalidValue("packed scores: the columns are not of one length")

    @property
    def num_scored(self) -> int:
        return len(self.chosen) // 4

    @property
    def num_listed(self) -> int:
        """Listed ids of all entries together."""
        return len(self.listed_ranks) // 4


class TokenScores(Sequence["dict[int, Logprob] | None"]):
    """Columns of float32 and int32, appended to by the engine and never changed afterwards.

    leading_none: entry 0 is None (a prompt's first token has no score). listed_ids: ids scored in every entry;
    listed_scores and listed_ranks hold len(listed_ids) values an entry.
    """

    COLUMNS = (
        "leading_none",
        "listed_ids",
        "token_ids",
        "chosen",
        "rank",
        "num_top",
        "top_first",
        "top_ids",
        "top_scores",
        "listed_ranks",
        "listed_scores",
    )
    __slots__ = (*COLUMNS, "spell")

    def __init__(self, leading_none: bool = False, listed_ids: Sequence[int] | None = None) -> None:
        self.leading_none = leading_none
        self.listed_ids = tuple(listed_ids or ())
        self.spell: Callable[[int], str] | None = None
        """Gives the text of an id for `Logprob.decoded_token`."""
        self.token_ids = array("i")
        self.chosen = array("f")
        self.rank = array("i")
        self.num_top = array("i")
        self.top_first = array("q")
        self.top_ids = array("i")
        self.top_scores = array("f")
        self.listed_ranks = array("i")
        self.listed_scores = array("f")

    def append(
        self,
        token_id: int,
        chosen: float,
        rank: int,
        top_ids: Packed,
        top_scores: Packed,
        listed_ranks: Packed | None = None,
        listed_scores: Packed | None = None,
    ) -> None:
        """One more token. The others are buffers: ids and ranks int32, scores float32."""
        self.token_ids.append(token_id)
        self.chosen.append(chosen)
        self.rank.append(rank)
        self.num_top.append(len(top_ids))
        self.top_first.append(len(self.top_ids))
        if len(top_ids):
            self.top_ids.frombytes(memoryview(top_ids).cast("B"))
            self.top_scores.frombytes(memoryview(top_scores).cast("B"))
        if self.listed_ids:
            assert listed_ranks is not None and listed_scores is not None
            assert len(listed_ranks) == len(listed_scores) == len(self.listed_ids)
            self.listed_ranks.frombytes(memoryview(listed_ranks).cast("B"))
            self.listed_scores.frombytes(memoryview(listed_scores).cast("B"))

    @property
    def num_scored(self) -> int:
        return len(self.chosen)

    def cut(self, first: int, end: int, most_top: int | None = None) -> TokenScores:
        """A copy of scored entries first .. end - 1, without the leading None, and with most_top of the best of each at
        most."""
        part = TokenScores(listed_ids=self.listed_ids)
        part.token_ids = self.token_ids[first:end]
        part.chosen = self.chosen[first:end]
        part.rank = self.rank[first:end]
        listed = slice(first * len(self.listed_ids), end * len(self.listed_ids))
        part.listed_ranks, part.listed_scores = self.listed_ranks[listed], self.listed_scores[listed]
        part.num_top = self.num_top[first:end]
        if most_top is not None and max(part.num_top, default=0) > most_top:
            part.num_top = array("i", [min(count, most_top) for count in part.num_top])
            for low, count in zip(self.top_first[first:end], part.num_top, strict=True):
                part.top_ids += self.top_ids[low : low + count]
                part.top_scores += self.top_scores[low : low + count]
        elif part.num_top:
            tops = slice(self.top_first[first], self.top_first[end - 1] + self.num_top[end - 1])
            part.top_ids, part.top_scores = self.top_ids[tops], self.top_scores[tops]
        part.top_first = _firsts(part.num_top)
        return part

    def copy(self) -> TokenScores:
        """The same entries in columns of its own."""
        twin = TokenScores(self.leading_none, self.listed_ids)
        twin.extend(self)
        return twin

    def pack(self) -> PackedScores:
        """A copy as a plain value."""
        return PackedScores(*(getattr(self, name).tobytes() for name in PackedScores.__struct_fields__))

    @staticmethod
    def unpack(
        packed: PackedScores,
        token_ids: Sequence[int],
        leading_none: bool = False,
        listed_ids: Sequence[int] | None = None,
    ) -> TokenScores:
        """token_ids: the scored tokens, as many as were packed."""
        found = TokenScores(leading_none, listed_ids)
        found.token_ids.extend(token_ids)
        for name in packed.__struct_fields__:
            getattr(found, name).frombytes(getattr(packed, name))
        found.top_first = _firsts(found.num_top)
        return found

    def extend(self, other: TokenScores) -> None:
        assert self.listed_ids == other.listed_ids, "scores of two different lists of ids"
        shift = len(self.top_ids)
        self.token_ids.extend(other.token_ids)
        self.chosen.extend(other.chosen)
        self.rank.extend(other.rank)
        self.num_top.extend(other.num_top)
        self.top_first.extend(array("q", [first + shift for first in other.top_first]))
        self.top_ids.extend(other.top_ids)
        self.top_scores.extend(other.top_scores)
        self.listed_ranks.extend(other.listed_ranks)
        self.listed_scores.extend(other.listed_scores)

    def _entry(self, i: int) -> dict[int, Logprob]:
        low, spell = self.top_first[i], self.spell
        entry: dict[int, Logprob] = {}
        for j in range(self.num_top[i]):
            token_id = self.top_ids[low + j]
            entry[token_id] = Logprob(self.top_scores[low + j], j + 1, spell(token_id) if spell else None)
        for j, token_id in enumerate(self.listed_ids, i * len(self.listed_ids)):
            if token_id not in entry:
                entry[token_id] = Logprob(
                    self.listed_scores[j], self.listed_ranks[j], spell(token_id) if spell else None
                )
        chosen = self.token_ids[i]
        if chosen not in entry:
            entry[chosen] = Logprob(self.chosen[i], self.rank[i], spell(chosen) if spell else None)
        return entry

    def __len__(self) -> int:
        return len(self.chosen) + self.leading_none

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | None | list[dict[int, Logprob] | None]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"entry {index} of {len(self)}")
        at = index % len(self) - self.leading_none
        return None if at < 0 else self._entry(at)

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Bitwise equality of every column."""
        if not isinstance(other, TokenScores):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.COLUMNS)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenScores({list(self)!r})"


def _firsts(num_top: array[int]) -> array[int]:
    """Where each entry's best begin."""
    return array("q", accumulate(num_top[:-1], initial=0) if num_top else ())
