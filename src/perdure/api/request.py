"""`Request`: one prompt with its settings, as submitted. Its identity inside the engine is given at admission."""

from __future__ import annotations

import msgspec

from perdure.api.sampling import SamplingParams

RequestId = str | int


class Request(msgspec.Struct, frozen=True, array_like=True):
    """request_id: the caller's name, unique among live requests and returned as given (7 and "7" differ).

    ticket: the submitter's own number; every event of this request carries it, so that events find the one call that
    submitted it. stream: whether progress is reported before the end. routed: whether what admission resolved, and the
    scores of the prompt, are told as soon as they are known, for a coordinator that may have to go on elsewhere.
    """

    request_id: RequestId
    ticket: int
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    stream: bool = False
    routed: bool = False
