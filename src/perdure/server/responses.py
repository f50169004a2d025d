"""`/v1/responses`: an answer as items, whole or as a stream of events. Nothing is kept of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from perdure import InvalidValue, PerdureError, RequestOutput
from perdure.api.output import CompletionOutput
from perdure.server import params, prompts
from perdure.server.answer import Answer, answers_for
from perdure.server.batch import Batch, Part, unless_gone
from perdure.server.bodies import read
from perdure.server.calling import Calling
from perdure.server.errors import HTTPError
from perdure.server.front import Front
from perdure.server.items import Items, messages_of
from perdure.server.protocol.chat import Function, NamedFunction, NamedTool, Tool
from perdure.server.protocol.common import JsonSchemaFormat, ResponseFormat
from perdure.server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    ResponsesEvent,
    ResponsesNamedTool,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesUsage,
    TextFormat,
)
from perdure.server.replies import begun, chained, json_response
from perdure.server.stream import EventStream, event


async def responses(front: Front, request: Request) -> Response:
    body = await read(request, ResponsesRequest, front.config.max_body_bytes)
    front.check_model(body.model)
    if body.n not in (None, 1):
        raise InvalidValue(f"n={body.n}: a response is one")
    tools = [
        Tool(
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            )
        )
        for tool in body.tools or ()
    ]
    choice: Any = body.tool_choice
    if isinstance(choice, ResponsesNamedTool):
        choice = NamedTool(function=NamedFunction(name=choice.name))
    calling = Calling.of(tools, choice, body.parallel_tool_calls, front.convention)
    if body.text is not None and body.text.format is not None:
        if body.response_format is not None:
            raise InvalidValue("response_format is text.format of other endpoints: give one of them")
        body.response_format = _format(body.text.format)
    request.state.words = params.words_of(body)
    settings = params.of_response(body, calling.structure)
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        template_kwargs.setdefault("reasoning_effort", body.reasoning.effort)
    messages, places = messages_of(body.input, body.instructions)
    request.state.words = {**request.state.words, **{f"messages[{at}]": place for at, place in enumerate(places)}}
    if not messages:
        raise HTTPError(400, "input=[] is an empty conversation", param="input")
    (prompt,) = await prompts.of_chats(
        front.llm,
        [messages],
        tools=calling.shown,
        chat_template_kwargs=template_kwargs,
    )
    batch = await Batch.of(front, [prompt], settings, body.request_id, "resp", body.cache_salt)
    request_id = batch.request_id
    (answer,) = answers_for(front, settings, calling, prompt, request_id)
    reply = _Reply(front, body, batch, request_id, answer)
    if not body.stream:
        (result,) = await unless_gone(request, batch.results(), batch.abort)
        return json_response(reply.whole(result), request_id)
    parts = batch.parts()
    first = await unless_gone(request, begun(parts), batch.abort)
    return EventStream(reply.events(chained(first, parts)), batch.abort, {"X-Request-Id": request_id}, done=b"")


def _format(given: TextFormat) -> ResponseFormat:
    schema = None
    if given.type == "json_schema":
        if given.schema is None:
            raise HTTPError(400, "text.format.schema is missing for type 'json_schema'", param="text.format.schema")
        schema = JsonSchemaFormat(name=given.name or "", schema=given.schema)
    return ResponseFormat(type=given.type, json_schema=schema)


class _Reply:
    def __init__(self, front: Front, body: ResponsesRequest, batch: Batch, request_id: str, answer: Answer) -> None:
        self._front = front
        self._body = body
        self._batch = batch
        self._request_id = request_id
        self._answer = answer
        self._created = int(time.time())
        self._numbers = itertools.count()
        self._items = Items(request_id, self._numbers.__next__)
        self._token_ids: list[int] = []
        self._weight_epochs: list[tuple[int, int]] = []

    def whole(self, result: RequestOutput | PerdureError) -> ResponsesResponse:
        """Raises the error that refused or ended it."""
        if isinstance(result, PerdureError):
            raise result
        if result.error is not None:
            raise result.error
        for _ in self._took(result.outputs[0]):
            pass
        return self._told(result.outputs[0].finish_reason)

    async def events(self, parts: AsyncIterator[Part]) -> AsyncGenerator[bytes]:
        """Raises the error that ended it, after what was told before."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, self._told(None))
        async for _, output in parts:
            if isinstance(output, PerdureError):
                raise output
            for one in self._took(output.outputs[0]):
                yield event(one, one.type)
            if output.error is not None:
                raise output.error
            if output.finished:
                told = self._told(output.outputs[0].finish_reason)
                yield self._event(f"response.{told.status}", told)

    def _took(self, output: CompletionOutput) -> Iterator[ResponsesEvent]:
        """The events of one part of the output, or of all of it."""
        self._token_ids += output.token_ids
        self._weight_epochs += output.weight_epochs
        deltas = self._answer.push(output.text)
        if output.finish_reason is not None:
            deltas += self._answer.end()
        for delta in deltas:
            yield from self._items.take(delta)
        if output.finish_reason is not None:
            yield from self._items.end(_status(output.finish_reason))

    def _event(self, kind: str, told: ResponsesResponse) -> bytes:
        return event(ResponsesEvent(type=kind, sequence_number=next(self._numbers), response=told), kind)

    def _told(self, finish_reason: str | None) -> ResponsesResponse:
        """None: it goes on."""
        body, status = self._body, _status(finish_reason)
        told = ResponsesResponse(
            id=self._request_id,
            created_at=self._created,
            status=status,
            model=self._front.model,
            output=self._items.output if finish_reason is not None else [],
            usage=None if finish_reason is None else self._usage(),
            incomplete_details=IncompleteDetails(reason=_WHY[str(finish_reason)]) if status == "incomplete" else None,
            instructions=body.instructions,
            tools=[msgspec.to_builtins(tool) for tool in body.tools or ()],
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=body.temperature,
            top_p=body.top_p,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata,
        )
        if body.return_token_ids and finish_reason is not None:
            told.token_ids, told.weight_epochs = self._token_ids, self._weight_epochs
            told.prompt_token_ids = self._batch.prompts[0].token_ids
        return told

    def _usage(self) -> ResponsesUsage:
        num_input, num_output = self._batch.num_prompt_tokens, len(self._token_ids)
        return ResponsesUsage(
            input_tokens=num_input,
            input_tokens_details=InputTokensDetails(cached_tokens=self._batch.num_cached_tokens),
            output_tokens=num_output,
            total_tokens=num_input + num_output,
        )


_WHY = {"length": "max_output_tokens", "abort": "abort"}


def _status(finish_reason: str | None) -> Any:
    if finish_reason is None:
        return "in_progress"
    return "incomplete" if finish_reason in _WHY else "completed"
