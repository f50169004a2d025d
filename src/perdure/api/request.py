"""`Request`: one prompt with its settings, as submitted. Its identity inside the engine is given at admission."""

from __future__ import annotations

import msgspec

from perdure.api.errors import InvalidValue, shown
from perdure.api.sampling import MAX_INTEGER, SamplingParams, is_unicode

RequestId = str | int

MAX_SALT_LENGTH = 256


def checked_id(request_id: object) -> RequestId:
    """The id, if it can be one. Raises `InvalidValue`."""
    if isinstance(request_id, bool) or not isinstance(request_id, (str, int)):
        raise InvalidValue(f"request_id={shown(request_id)} is neither a str nor an int")
    if abs(request_id) > MAX_INTEGER if isinstance(request_id, int) else not is_unicode(request_id):
        raise InvalidValue(f"request_id={shown(request_id)} fits neither 64 bits nor UTF-8")
    return request_id


class Request(msgspec.Struct, frozen=True, array_like=True):
    """request_id: the caller's name, unique among live requests and returned as given (7 and "7" differ).

    ticket: the submitter's own number; every event of this request carries it, so that events find the one call that
    submitted it. stream: whether progress is reported before the end. cache_salt: cached prefixes are shared among
    requests of one salt, and with no others. routed: whether what admission resolved, and the scores of the prompt, are
    told as soon as they are known, for a coordinator that may have to go on elsewhere. is_closed: whether whoever
    submitted it waits for the end of it and of what came with it, and misses no token before.
    """

    request_id: RequestId
    ticket: int
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    stream: bool = False
    cache_salt: str | None = None
    routed: bool = False
    is_closed: bool = False

    def __post_init__(self) -> None:
        check_salt(self.cache_salt)


def check_salt(salt: object) -> None:
    """Raises `InvalidValue` for what is neither None nor a text of a reasonable length."""
    if salt is None:
        return
    if not isinstance(salt, str):
        raise InvalidValue(f"cache_salt={shown(salt)} is not a str")
    if not 0 < len(salt) <= MAX_SALT_LENGTH or not is_unicode(salt):
        begin = f"{salt[:20]!r}..." if len(salt) > MAX_SALT_LENGTH else repr(salt)
        raise InvalidValue(
            f"cache_salt={begin} has {len(salt)} characters: it is None, or valid Unicode of 1 to {MAX_SALT_LENGTH}"
        )
