"""How a request ends, as plain values."""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.api import errors

FinishReason = Literal["stop", "length", "abort", "error"]


class Failure(msgspec.Struct, frozen=True):
    """An error as a plain value: a class of `api.errors` by name, and its message."""

    kind: str
    message: str

    @staticmethod
    def of(error: errors.PerdureError) -> Failure:
        return Failure(type(error).__name__, str(error))

    @staticmethod
    def of_step(error: BaseException) -> Failure:
        """Whatever was raised while a step ran."""
        return Failure.of(errors.StepFailed(errors.described(error)))

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


class Ending(msgspec.Struct, frozen=True):
    """The end of one sample. stop: with reason "stop"; failure: with reason "error"."""

    reason: FinishReason
    stop: StopMatch | None = None
    failure: Failure | None = None


# What the executing side says of a row that has no next token.

BAD_LOGITS = Failure.of(errors.BadLogits("the model's logits hold NaN or no finite value"))
_NOTHING = "what the request asked leaves no usable logits to sample from: all excluded, or NaN"
NOTHING_LEFT = Failure.of(errors.NothingToSample(_NOTHING))
NOTHING_ALLOWED = Failure.of(
    errors.NothingToSample(_NOTHING + "; structured_outputs allows some ids here, the other settings none of them")
)
