"""`Request`: one prompt with its settings, as submitted. Its identity inside the engine is given at admission."""

from __future__ import annotations

import msgspec

from perdure.api.errors import InvalidValue
from perdure.api.sampling import MAX_INTEGER, SamplingParams, is_unicode

RequestId = str | int


def checked_id(request_id: object) -> RequestId:
    """The id, if it can be one. Raises `InvalidValue`."""
    if isinstance(request_id, bool) or not isinstance(request_id, (str, int)):
        raise InvalidValue(f"request_id={request_id!r} is neither a str nor an int")
    if abs(request_id) > MAX_INTEGER if isinstance(request_id, int) else not is_unicode(request_id):
        raise InvalidValue(f"request_id={request_id!r} fits neither 64 bits nor UTF-8")
    return request_id


class Request(msgspec.Struct, frozen=True, array_like=True):
    """request_id: the caller's name, unique among live requests and returned as given (7 and "7" differ).

    ticket: the submitter's own number; every event of this request carries it, so that events find the one call that
    submitted it. stream: whether progress is reported before the end.
    """

    request_id: RequestId
    ticket: int
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    stream: bool = False
