"""When a request ends by itself: end ids, stop ids, stop sequences, stop strings, length.

- Every new token is tested in order, so that the first stop wins wherever in a step's tokens it falls.
- Sequences and strings are matched over the whole output, across any interruption: they read the one list of tokens.
- Before `min_tokens` nothing ends a request; a string or sequence completed before it does not count later either. The
  same holds inside a forced continuation.
- Text is made above the core: a request with stop strings brings a cursor that turns ids into text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

from perdure.api.errors import StepFailed, described
from perdure.api.event import StopMatch
from perdure.api.request import Request


class Begins:
    """Where each id of an output begins in its text: in half characters, so that an id without text of its own stands
    between the character before it and the one after. Ascending."""

    def __init__(self) -> None:
        self._halves: list[int] = []

    def __len__(self) -> int:
        return len(self._halves)

    def add(self, character: int, has_text: bool = True) -> None:
        """The next id begins in this character, and so do those that were thought to begin after it: their bytes have
        become a part of it. has_text=False: it stands before it."""
        halves, begin = self._halves, 2 * character - (not has_text)
        at = len(halves)
        while at and halves[at - 1] > begin:
            at -= 1
            halves[at] = begin
        halves.append(begin)

    def num_before(self, character: int) -> int:
        """How many ids begin before this character."""
        return bisect_left(self._halves, 2 * character)


class TextCursor(Protocol):
    """Incremental text of one output. begins: of all ids that were pushed."""

    begins: Begins

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these further tokens."""


CursorFactory = Callable[[Request], TextCursor]


class StopStrings:
    """Matches strings in the decoded output at token boundaries."""

    def __init__(self, stops: Sequence[str], cursor: TextCursor) -> None:
        self._stops = stops
        self._longest = max(len(stop) for stop in stops)
        self._cursor = cursor
        self._tail = ""
        """The end of the text: all that can still be part of a match."""
        self._num_before = 0
        """Characters before the tail."""

    def push(self, token: int, counts: bool) -> StopMatch | None:
        """Of the matches completed by this token the one that ends first, and of those the longest."""
        try:
            new = self._cursor.push([token])
        except Exception as error:  # the tokenizer is not ours: its fault ends this request only
            raise StepFailed(f"no text could be made of token {token}: {described(error)}") from error
        text, first_new = self._tail + new, len(self._tail)
        found = self._first_match(text, first_new) if counts else None
        kept = min(len(text), self._longest - 1)
        self._num_before += len(text) - kept
        self._tail = text[len(text) - kept :]
        return found

    def _first_match(self, text: str, first_new: int) -> StopMatch | None:
        """In the tail with what is new."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, first_new + 1 - len(stop)))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        begin = self._num_before + best[1]
        num_tokens = len(self._cursor.begins)
        num_matched = num_tokens - self._cursor.begins.num_before(begin)
        return StopMatch(best[2], num_tokens, num_matched, text_end=begin, match_length=len(best[2]))


class StopRule:
    """One request's stops, with everything that does not change resolved.

    end_ids of the model count unless ignored, and always after a grammar; max_output is the budget after clipping.
    """

    def __init__(self, request: Request, end_ids: Sequence[int], max_output: int, make_cursor: CursorFactory) -> None:
        params = request.params
        self.prompt_length = len(request.prompt_token_ids)
        self.max_output = max_output
        self.min_tokens = min(params.min_tokens, max_output + 1)  # more would mean the same: it ends by length
        self.num_forced = len(params.forced_token_ids or ())
        self.reasons: dict[int, int | None] = {token: token for token in params.stop_token_ids}
        if not params.ignore_eos or params.structured_outputs is not None:  # a grammar ends where nothing else follows
            self.reasons.update(dict.fromkeys(end_ids))
        self.sequences = params.stop_token_sequences
        self.strings = StopStrings(params.stop, make_cursor(request)) if params.stop else None
        self.num_tested = 0
        """Output tokens that were turned into text, or could not be: the last of them, where that failed."""

    @property
    def can_stop(self) -> bool:
        """Whether anything but its budget may end it."""
        return bool(self.reasons or self.sequences) or self.strings is not None

    @property
    def masked_ids(self) -> tuple[int, ...]:
        """Ids that cannot be sampled before min_tokens."""
        return tuple(self.reasons) if self.min_tokens else ()

    def pass_over(self, output: Sequence[int]) -> None:
        """These first output tokens were tested elsewhere: text goes on after them."""
        if self.strings is not None:
            for token in output:
                self.strings.push(token, counts=False)

    def first_stop(self, tokens: list[int], first: int) -> StopMatch | None:
        """The earliest stop completed by one of tokens[first:]. Called once for every new token, in order."""
        if self.sequences or self.strings is not None:
            return self._first_of_all(tokens, first)
        for at in range(first, len(tokens)):
            if tokens[at] in self.reasons:
                count = at + 1 - self.prompt_length
                if count > self.min_tokens and count > self.num_forced:
                    return StopMatch(self.reasons[tokens[at]], count, 1)
        return None

    def _first_of_all(self, tokens: list[int], first: int) -> StopMatch | None:
        for at in range(first, len(tokens)):
            count = at + 1 - self.prompt_length
            counts = count >= self.min_tokens and count > self.num_forced
            self.num_tested = count
            text = self.strings.push(tokens[at], counts) if self.strings is not None else None
            if tokens[at] in self.reasons and counts and count > self.min_tokens:
                return StopMatch(self.reasons[tokens[at]], count, 1)
            if counts:
                ending = [s for s in self.sequences if len(s) <= count and tuple(tokens[at + 1 - len(s) : at + 1]) == s]
                if ending:
                    longest = max(ending, key=len)
                    return StopMatch(longest, count, len(longest))
            if text is not None:
                return text
        return None
