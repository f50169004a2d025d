"""Ids to text at the engine's edge: incremental for streams and stop strings, once for results.

- A result's text is one decode of its whole output; the parts of a stream joined are that text (`engine/spelling.py`).
- A part never ends inside a character, and holds back only what can still become a stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from perdure.api.errors import StepFailed, described
from perdure.api.event import Failure, Record
from perdure.api.output import CompletionOutput, RequestMetrics, RequestOutput
from perdure.api.request import Request
from perdure.api.scores import TokenScores
from perdure.engine.spelling import text_cursor

if TYPE_CHECKING:
    from perdure.engine.tokenizer import Tokenizer


def build_output(
    request: Request,
    records: Sequence[Record],
    tokenizer: Tokenizer | None,
    metrics: RequestMetrics,
    return_prompt: bool,
) -> RequestOutput:
    """The result of an ended request. records: of its children, each once, as they ended."""
    records = sorted(records, key=lambda record: record.child)
    shows_prompt = request.params.return_prompt or return_prompt
    try:
        prompt = _prompt(request, tokenizer) if shows_prompt else None
    except Exception as error:
        prompt, tokenizer, records = None, None, [_without_text(record, error) for record in records]
    built = [build_completion(request, record, tokenizer) for record in records]
    failure = next((failure for _, failure in built if failure is not None), None)
    prompt_scores = next((record.prompt_scores for record in records if record.prompt_scores is not None), None)
    return RequestOutput(
        request_id=request.request_id,
        outputs=[completion for completion, _ in built],
        finished=True,
        prompt=prompt,
        prompt_token_ids=records[0].prompt_token_ids if shows_prompt else None,
        prompt_logprobs=_spelled(prompt_scores, tokenizer),
        num_cached_tokens=max(record.num_cached_tokens for record in records),
        exact=all(record.exact for record in records),
        metrics=metrics,
        error=None if failure is None else failure.to_exception(),
    )


def build_completion(
    request: Request, record: Record, tokenizer: Tokenizer | None
) -> tuple[CompletionOutput, Failure | None]:
    """One sample's part of a result, and what failed. If no text can be made of it, it is an error with all its ids and
    scores."""
    try:
        return _completion(request, record, tokenizer), record.failure
    except Exception as error:
        failed = _without_text(record, error)
        return _completion(request, failed, None), failed.failure


def _without_text(record: Record, error: Exception) -> Record:
    message = f"no text could be made of its tokens: {described(error)}"
    return replace(record, finish_reason="error", stop=None, failure=Failure(StepFailed.__name__, message))


def _completion(request: Request, record: Record, tokenizer: Tokenizer | None) -> CompletionOutput:
    params, stop = request.params, record.stop
    token_ids, scores, epochs = record.token_ids, record.scores, record.weight_epochs
    text = _text(request, record, tokenizer)
    if stop is not None and params.strip_stop_tokens:
        kept = len(token_ids) - stop.num_matched
        token_ids = token_ids[:kept]
        scores = None if scores is None else scores.cut(0, kept)
        epochs = [(first, epoch) for first, epoch in epochs if first < kept]
    return CompletionOutput(
        index=record.child,
        text=text,
        token_ids=token_ids,
        logprobs=_spelled(scores, tokenizer),
        finish_reason=record.finish_reason,
        stop_reason=None if stop is None else stop.reason,
        weight_epochs=epochs,
    )


def _text(request: Request, record: Record, tokenizer: Tokenizer | None) -> str:
    params, stop, token_ids = request.params, record.stop, record.token_ids
    if tokenizer is None or not params.detokenize:
        return ""
    if stop is None or stop.text_end is not None:
        text = tokenizer.decode(token_ids, params.skip_special_tokens)
        if stop is None or stop.text_end is None:
            return text
        return text[: stop.text_end + (stop.match_length if params.include_stop_str_in_output else 0)]
    shown = len(token_ids) - (0 if params.include_stop_str_in_output else stop.num_matched)
    return tokenizer.decode(token_ids[:shown], params.skip_special_tokens)


def _prompt(request: Request, tokenizer: Tokenizer | None) -> str | None:
    if request.prompt is not None or tokenizer is None:
        return request.prompt
    return tokenizer.decode(request.prompt_token_ids, False)


def _spelled(scores: TokenScores | None, tokenizer: Tokenizer | None) -> TokenScores | None:
    """Let entries show each id's own text."""
    if scores is not None and tokenizer is not None:
        scores.spell = lambda token_id: tokenizer.decode([token_id], False)
    return scores


class StreamBuilder:
    """Turns the progress of one sample into parts. With `cumulative` a part holds all so far, else what is new."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, cumulative: bool, child: int = 0) -> None:
        params = request.params
        self._request = request
        self._child = child
        self._cumulative = cumulative
        self._interval = params.stream_interval
        self._strip = params.strip_stop_tokens
        self._include_stop = params.include_stop_str_in_output
        self._sequences = [list(s) for s in params.stop_token_sequences if len(s) > 1]
        self._stops = params.stop
        self._tokenizer = tokenizer
        self._cursor = (
            text_cursor(tokenizer, params.skip_special_tokens) if tokenizer is not None and params.detokenize else None
        )
        self._token_ids: list[int] = []
        self._scores = TokenScores(listed_ids=params.logprob_token_ids) if params.asks_scores else None
        self._epochs: list[tuple[int, int]] = []
        self._num_chars = 0
        self._pieces: list[str] = []
        """The text that parts are made of: all of it with `cumulative`, else what no part has shown yet."""
        self._ending = ""
        """Its end, as much as a stop string could have begun in."""
        self._longest_stop = max(map(len, params.stop), default=0)
        self._ids_out = 0
        self._text_out = 0

    def progress(self, token_ids: Sequence[int], scores: TokenScores | None, epoch: int) -> RequestOutput | None:
        """A part, if enough is new and certain. epoch: of the weights these tokens come from."""
        if not self._epochs or self._epochs[-1][1] != epoch:
            self._epochs.append((len(self._token_ids), epoch))
        self._token_ids += token_ids
        if self._scores is not None and scores is not None:
            self._scores.extend(scores)
        num_ids, text_end = self._certain()
        if num_ids - self._ids_out < self._interval:
            return None
        text = self._text_to(text_end)
        completion = self._part(self._token_ids, self._scores, self._epochs, text, num_ids)
        return RequestOutput(self._request.request_id, [completion], finished=False)

    def end(self, final: CompletionOutput) -> CompletionOutput:
        """The last part: what the result has beyond the parts before."""
        if self._cumulative:
            return final
        text = final.text[self._text_out :]
        last = self._part(final.token_ids, final.logprobs, final.weight_epochs, text, len(final.token_ids))
        return replace(last, finish_reason=final.finish_reason, stop_reason=final.stop_reason)

    def _certain(self) -> tuple[int, int]:
        """How many ids and how much text no later stop can take back."""
        held_ids = self._begun_sequence()
        text_ids = len(self._token_ids) - (0 if self._include_stop else held_ids)
        if self._cursor is not None:
            for token in self._token_ids[len(self._cursor.begins) : text_ids]:
                self._add(self._cursor.push([token]))
        text_end = self._num_chars - (0 if self._include_stop else self._begun_string())
        num_ids = len(self._token_ids)
        if self._strip:
            num_ids -= held_ids
            if self._stops and self._cursor is not None:
                num_ids = min(num_ids, self._cursor.begins.num_before(self._num_chars - self._begun_string()))
        return num_ids, text_end

    def _add(self, piece: str) -> None:
        """One token's text."""
        if piece:
            self._num_chars += len(piece)
            self._pieces.append(piece)
            if self._longest_stop:
                self._ending = (self._ending + piece)[-self._longest_stop :]

    def _text_to(self, text_end: int) -> str:
        """What a part shows, up to here. Text that was shown stays so."""
        text, first = "".join(self._pieces), 0 if self._cumulative else self._text_out
        self._text_out = max(self._text_out, text_end)
        shown = text[: self._text_out - first]
        self._pieces = [text if self._cumulative else text[len(shown) :]]
        return shown

    def _begun_sequence(self) -> int:
        """Length of the longest end of the ids that begins a stop sequence."""
        return max((_overlap(self._token_ids, s) for s in self._sequences), default=0)

    def _begun_string(self) -> int:
        return max((_overlap(self._ending, stop) for stop in self._stops), default=0)

    def _part(
        self,
        token_ids: list[int],
        scores: TokenScores | None,
        epochs: list[tuple[int, int]],
        text: str,
        num_ids: int,
    ) -> CompletionOutput:
        first_id, self._ids_out = 0 if self._cumulative else self._ids_out, num_ids
        part_scores = None if scores is None else _spelled(scores.cut(first_id, num_ids), self._tokenizer)
        return CompletionOutput(
            index=self._child,
            text=text,
            token_ids=token_ids[first_id:num_ids],
            logprobs=part_scores,
            weight_epochs=[(first, epoch) for first, epoch in epochs if first_id <= first < num_ids],
        )


def _overlap(whole: Sequence[object], stop: Sequence[object]) -> int:
    """Length of the longest proper beginning of `stop` that `whole` ends with."""
    for length in range(min(len(stop) - 1, len(whole)), 0, -1):
        if whole[len(whole) - length :] == stop[:length]:
            return length
    return 0
