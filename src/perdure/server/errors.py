"""Errors as HTTP tells them: a status, and OpenAI's form of the rest."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from starlette.responses import Response

from perdure import (
    EngineDead,
    InvalidValue,
    MaxSequenceLengthOverflow,
    ModelLoadError,
    NothingToSample,
    PerdureError,
    QueueFull,
    ReplicaLost,
    SamplingParams,
    StateError,
)
from perdure.api.errors import shortened
from perdure.server.protocol.common import ErrorBody, ErrorDetail

log = logging.getLogger("perdure")

_FIELD = re.compile(r"([a-z_]+)[=.\[ ]")
"""What a message of ours begins with where it tells of a field."""
_FIELDS = {*SamplingParams.__struct_fields__, "prompt", "prompt_token_ids", "messages", "tools", "tool_choice"}
_FIELDS |= {"request_id", "cache_salt", "chat_template_kwargs"}


Words = Mapping[str, str]
"""What a client called the settings that it gave under another name than the engine's, by that."""


class HTTPError(Exception):
    """Anything that ends a request with a status of its own. param: the field that is wrong, if it is one."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message=shortened(message), type=kind, param=param, code=code)
        self.headers = dict(headers or {})

    def response(self) -> Response:
        body = msgspec.json.encode(ErrorBody(error=self.detail))
        return Response(body, self.status, self.headers, media_type="application/json")


def as_http(error: Exception, words: Words = MappingProxyType({})) -> HTTPError:
    """Whatever was raised. A fault of ours keeps its traceback in the log, and tells no more than its kind."""
    match error:
        case HTTPError():
            return error
        case InvalidValue():
            code = "context_length_exceeded" if isinstance(error, MaxSequenceLengthOverflow) else None
            message, field = _in_words(str(error), words)
            return HTTPError(400, message, param=field, code=code)
        case NothingToSample():
            return HTTPError(400, _in_words(str(error), words)[0], code="nothing_to_sample")
        case ModelLoadError():
            return HTTPError(400, str(error), code="weights_refused")
        case StateError():
            return HTTPError(409, str(error), "conflict_error", code="wrong_state")
        case QueueFull():
            return HTTPError(429, str(error), "rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
        case EngineDead() | ReplicaLost():
            return HTTPError(503, str(error), "service_unavailable_error", code="engine_dead")
        case PerdureError():
            return HTTPError(500, str(error), "server_error")
    log.error("a request failed", exc_info=error)
    return HTTPError(500, f"an error of the server's own: {type(error).__name__}", "server_error")


def _in_words(message: str, words: Words) -> tuple[str, str | None]:
    """What is said, and of which field."""
    for ours, theirs in words.items():
        if message.startswith(ours) and message[len(ours) :].startswith(("=", ".", "[", " ")):
            return theirs + message.removeprefix(ours), theirs
    found = _FIELD.match(message)
    return message, found[1] if found and found[1] in _FIELDS else None
