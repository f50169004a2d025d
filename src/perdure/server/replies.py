"""Small things that answers of several endpoints share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from perdure import PerdureError, RequestOutput
from perdure.api.output import CompletionOutput
from perdure.server.batch import Batch, Part
from perdure.server.protocol.common import PromptTokensDetails, Sampling, StopReason, Usage


def json_response(value: msgspec.Struct, request_id: str | None = None, status: int = 200) -> Response:
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_of(output: RequestOutput | PerdureError) -> Exception | None:
    """What refused or ended it."""
    return output if isinstance(output, PerdureError) else output.error


def stop_reason(output: CompletionOutput) -> StopReason:
    found = output.stop_reason
    return list(found) if isinstance(found, tuple) else found


def usage(batch: Batch, num_output_tokens: int) -> Usage:
    num_prompt_tokens = batch.num_prompt_tokens
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=batch.num_cached_tokens),
    )


async def begun(parts: AsyncIterator[Part]) -> list[Part]:
    """The parts up to the first that is no error: until then a refusal can have a status of its own. Raises the first
    error if there is nothing else."""
    found: list[Part] = []
    async for part in parts:
        found.append(part)
        if error_of(part.output) is None:
            return found
    error = error_of(found[0].output)
    assert error is not None
    raise error


async def chained(first: Sequence[Part], rest: AsyncIterator[Part]) -> AsyncIterator[Part]:
    for part in first:
        yield part
    async for part in rest:
        yield part


def asks_usage(body: Sampling) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def usage_so_far(body: Sampling, batch: Batch, num_output_tokens: int) -> Usage | None | UnsetType:
    """Of an event that is not the last."""
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        return usage(batch, num_output_tokens)
    return None if asks_usage(body) else UNSET
