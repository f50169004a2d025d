"""What the engine loop reports, addressed by ticket.

A request gets any number of `Moment` and `Progress` and one `Ended`; or `Refused`, before any `Progress`. One with
n > 1 gets these for each of its children, who share the ticket (`child` says whose an event is), and `Refused` once.
A routed one also gets `Admitted`, and `PromptScored` if its prompt's scores were asked.
"""

from __future__ import annotations

import msgspec

from perdure.api.checkpoint import Checkpoint
from perdure.api.ending import Failure as Failure
from perdure.api.ending import FinishReason as FinishReason
from perdure.api.ending import StopMatch as StopMatch
from perdure.api.moment import MomentKind
from perdure.api.request import RequestId
from perdure.api.sampling import LogprobsMode
from perdure.api.scores import TokenScores


class Record(msgspec.Struct, frozen=True):
    """All that remains of an ended request, or of one of its children, copied out of the core. Token ids and scores are
    not stripped yet. prompt_scores: of the prompt, which the children share: in the record of the last to end.
    """

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
    child: int = 0


class Refused(msgspec.Struct, frozen=True):
    """The request was not admitted; nothing of it exists."""

    ticket: int
    request_id: RequestId
    failure: Failure


class Admitted(msgspec.Struct, frozen=True):
    """A routed request was taken in, and this is what was resolved for it."""

    ticket: int
    seed: int
    max_output: int
    logprobs_mode: LogprobsMode


class PromptScored(msgspec.Struct, frozen=True):
    """The scores of a routed request's prompt, all of them; told before its first token."""

    ticket: int
    scores: TokenScores


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
    child: int = 0


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a request on its way. Its time is that of the loop when it tells of it.

    "ended" and "refused" are told by `Ended` and `Refused`; a journal writes them as moments too.
    """

    ticket: int
    kind: MomentKind
    num_tokens: int = 0
    detail: RequestId = ""
    child: int = 0


class Ended(msgspec.Struct, frozen=True):
    """The one end of a request, or of one of its children. num_left: of these, how many have not ended: with 0 of them
    nothing more will come."""

    ticket: int
    record: Record
    num_left: int = 0


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


Event = Refused | Admitted | PromptScored | Progress | Moment | Ended | Taken | Done
