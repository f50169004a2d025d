"""Which ids a grammar allows next, for the rows that have one, computed on a thread beside the model's forward.

- A row's way through its grammar is a function of its output alone: one token a step, and all of it anew after an
  eviction.
- A row whose grammar leads nowhere is an error of that row; others do not notice.

Shapes: V = vocabulary, W = words of 32 bits that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perdure.api.ending import Failure
from perdure.api.errors import InvalidValue, NothingToSample
from perdure.api.structured import StructuredOutputsParams
from perdure.ops.adjust import RowMasks
from perdure.ops.select import Ids
from perdure.runner.grammars import Grammars, fault_of

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

WORD = 32
Mask = NDArray[np.int32]
"""[W]"""


@dataclass(slots=True)
class Walk:
    """One output's way through what was asked of it. ends_last: an end id is allowed only where nothing else is."""

    asked: StructuredOutputsParams
    ends_last: bool
    matcher: LLMatcher | None = field(default=None, compare=False)
    num_walked: int = field(default=0, compare=False)

    def follow(self, tokens: list[int], first: int, grammars: Grammars) -> LLMatcher:
        """Go on to the end of the output, which is tokens[first:]. Raises `InvalidValue` as compiling does."""
        if self.matcher is None:
            self.matcher = grammars.matcher(self.asked)
        if new := tokens[first + self.num_walked :]:
            self.matcher.consume_tokens(new)
            self.num_walked += len(new)
        return self.matcher


@dataclass(frozen=True, slots=True)
class Wanted:
    """The mask of a slot's row, after the output tokens[first:]."""

    slot: int
    walk: Walk
    tokens: list[int]
    first: int


class Masks:
    """One step's masks at a time: `begin`, then `take`, for all rows at once or some at a time."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self._num_words = -(-vocab_size // WORD)
        self._pool = ThreadPoolExecutor(1, "perdure-masks")
        self._executor: LLExecutor | None = None
        self._begun: Future[dict[int, Mask | Failure]] | None = None

    def begin(self, wanted: list[Wanted]) -> None:
        """Compute these beside what the caller does next."""
        if self._begun is not None:
            self._begun.exception()  # of a step that failed before it took them
            self._begun = None
        if wanted:
            self._begun = self._pool.submit(self._compute, wanted)

    def take(self, slots: Ids) -> tuple[RowMasks | None, dict[int, Failure]]:
        """Masks of those rows that have one, by their index, and why others have none."""
        if self._begun is None:
            return None, {}
        found = self._begun.result()
        rows, bits, failed = [], [], {}
        for row, slot in enumerate(slots.tolist()):
            match found.get(slot):
                case None:
                    pass
                case Failure() as why:
                    failed[row] = why
                case mask:
                    rows.append(row)
                    bits.append(mask)
        return (RowMasks(np.array(rows, np.int64), np.stack(bits)) if rows else None), failed

    def close(self) -> None:
        self._pool.shutdown()

    def _compute(self, wanted: list[Wanted]) -> dict[int, Mask | Failure]:
        """By slot."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor()
        found: dict[int, Mask | Failure] = {}
        going: list[tuple[Wanted, LLMatcher]] = []
        for one in wanted:
            try:
                going.append((one, one.walk.follow(one.tokens, one.first, self._grammars)))
            except InvalidValue as error:
                found[one.slot] = Failure.of(NothingToSample(str(error)))
        bits = np.zeros((len(going), self._num_words), np.int32)
        fill_next_token_bitmask_par(self._executor, [(matcher, row) for row, (_, matcher) in enumerate(going)], bits)
        for (one, matcher), mask in zip(going, bits, strict=True):
            fault = fault_of(matcher)
            if too_early := self._ends_too_early(matcher, mask):
                mask[:] = _without(mask, too_early)
                if not (fault or mask.any()):
                    fault = f"what must follow is the end id {too_early[0]}, and the output would end incomplete there"
            if one.walk.ends_last and (without := _without(mask, self._grammars.end_ids)).any():
                mask[:] = without
            why = NothingToSample(f"{one.walk.asked.shown}: {fault}")
            found[one.slot] = Failure.of(why) if fault else mask
        return found

    def _ends_too_early(self, matcher: LLMatcher, mask: Mask) -> list[int]:
        """End ids that the grammar allows here, by name or by their spelling, and goes on after."""
        allowed = [token for token in self._grammars.end_ids if mask.view(np.uint32)[token // WORD] >> token % WORD & 1]
        if not allowed or matcher.is_accepting():
            return []
        return [token for token in allowed if not self._completes(matcher, token)]

    def _completes(self, matcher: LLMatcher, token: int) -> bool:
        """Whether a grammar that names this end id ends with it. One that is a piece of text is never named."""
        if token in self._grammars.spelled_end_ids:
            return False
        ahead = matcher.deep_copy()
        return ahead.consume_token(token) and ahead.is_accepting()


def _without(mask: Mask, ids: Sequence[int]) -> Mask:
    """The mask with the bits of these ids cleared."""
    left = mask.view(np.uint32).copy()
    for token in ids:
        left[token // WORD] &= ~np.uint32(1 << token % WORD)
    return left.view(np.int32)
