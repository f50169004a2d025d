"""What the engine loop reports, addressed by ticket.

A request gets any number of `Moment` and `Progress` and one `Ended`; or `Refused`, before any `Progress`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.api import errors
from perdure.api.checkpoint import Checkpoint
from perdure.api.moment import MomentKind
from perdure.api.request import RequestId
from perdure.api.scores import TokenScores

FinishReason = Literal["stop", "length", "abort", "error"]


class Failure(msgspec.Struct, frozen=True):
    """An error as a plain value: a class of `api.errors` by name, and its message."""

    kind: str
    message: str

    @staticmethod
    def of(error: errors.PerdureError) -> Failure:
        return Failure(type(error).__name__, str(error))

    def to_exception(self) -> errors.PerdureError:
        found = getattr(errors, self.kind, None)
        assert isinstance(found, type) and issubclass(found, errors.PerdureError), self.kind
        return found(self.message)


class StopMatch(msgspec.Struct, frozen=True):
    """Why and where a request stopped.

    reason: None for an end id of the model, else the id, sequence or string. num_tokens: output tokens up to and with
    the one that completed the match. num_matched: how many of these belong to the match. text_end: for strings, where
    the match begins in the output's text (characters), and match_length its length.
    """

    reason: int | tuple[int, ...] | str | None
    num_tokens: int
    num_matched: int
    text_end: int | None = None
    match_length: int = 0


class Record(msgspec.Struct, frozen=True):
    """All that remains of an ended request, copied out of the core. Token ids and scores are not stripped yet."""

    request_id: RequestId
    arrival: int
    seed: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    stop: StopMatch | None
    scores: TokenScores | None
    prompt_scores: TokenScores | None
    exact: bool
    num_cached_tokens: int
    num_pauses: int
    num_evictions: int
    num_checkpoints: int
    weight_epochs: list[tuple[int, int]]
    failure: Failure | None


class Refused(msgspec.Struct, frozen=True):
    """The request was not admitted; nothing of it exists."""

    ticket: int
    request_id: RequestId
    failure: Failure


class Progress(msgspec.Struct, frozen=True):
    """New output tokens of a streaming request, with their scores if asked; first is their output index, epoch that of
    the weights they come from.

    A request that ends with its tokens gets no `Progress` for them: `Ended` holds everything.
    """

    ticket: int
    first: int
    token_ids: list[int]
    scores: TokenScores | None
    epoch: int


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a request on its way. Its time is that of the loop when it tells of it.

    "ended" and "refused" are told by `Ended` and `Refused`; a journal writes them as moments too.
    """

    ticket: int
    kind: MomentKind
    num_tokens: int = 0
    detail: RequestId = ""


class Ended(msgspec.Struct, frozen=True):
    """The one end of a request."""

    ticket: int
    record: Record


class Taken(msgspec.Struct, frozen=True):
    """A checkpoint. request_ticket: of the request it was taken of, which may have ended with it: `Ended` follows."""

    ticket: int
    request_ticket: int
    checkpoint: Checkpoint


class Done(msgspec.Struct, frozen=True):
    """The answer to a control command."""

    ticket: int
    value: object = None
    failure: Failure | None = None


Event = Refused | Progress | Moment | Ended | Taken | Done
