"""`/v1/chat/completions`: a conversation answered, whole or as a stream of the same."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from perdure import PerdureError, RequestOutput, SamplingParams
from perdure.api.output import CompletionOutput
from perdure.server import params, prompts
from perdure.server.answer import answers_for, joined
from perdure.server.batch import Batch, Part, unless_gone
from perdure.server.bodies import read
from perdure.server.calling import Calling
from perdure.server.front import Front
from perdure.server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
)
from perdure.server.protocol.common import Usage
from perdure.server.replies import asks_usage, begun, chained, json_response, stop_reason, usage, usage_so_far
from perdure.server.scores import Names, chat_logprobs, prompt_logprobs
from perdure.server.stream import EventStream, event


async def chat_completions(front: Front, request: Request) -> Response:
    body = await read(request, ChatRequest, front.config.max_body_bytes)
    front.check_model(body.model)
    calling = Calling.of(body.tools, body.tool_choice, body.parallel_tool_calls, front.convention)
    request.state.words = params.words_of(body)
    settings = params.of_chat(body, calling.structure)
    (prompt,) = await prompts.of_chats(
        front.llm,
        [body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        tools=calling.shown,
        chat_template_kwargs=_template_kwargs(body),
    )
    batch = await Batch.of(front, [prompt], settings, body.request_id, "chatcmpl", body.cache_salt)
    request_id = batch.request_id
    reply = _Reply(front, body, settings, calling, batch, request_id)
    if not body.stream:
        (result,) = await unless_gone(request, batch.results(), batch.abort)
        return json_response(reply.whole(result), request_id)
    parts = batch.parts()
    first = await unless_gone(request, begun(parts), batch.abort)
    return EventStream(reply.events(chained(first, parts)), batch.abort, {"X-Request-Id": request_id})


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    given = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        given.setdefault("reasoning_effort", body.reasoning_effort)
    return given


class _Reply:
    """What becomes of the engine's result, choice by choice."""

    def __init__(
        self,
        front: Front,
        body: ChatRequest,
        settings: SamplingParams,
        calling: Calling,
        batch: Batch,
        request_id: str,
    ) -> None:
        self._front = front
        self._body = body
        self._batch = batch
        self._request_id = request_id
        self._tells_prompt_scores = settings.prompt_logprobs is not None
        self._names = Names(front.llm.tokenizer, bool(body.return_tokens_as_token_ids))
        self._created = int(time.time())
        self._num_output_tokens = 0
        self._begun: set[int] = set()
        self._answers = answers_for(front, settings, calling, batch.prompts[0], request_id)

    def whole(self, result: RequestOutput | PerdureError) -> ChatCompletion:
        """Raises the error that refused or ended it."""
        if isinstance(result, PerdureError):
            raise result
        if result.error is not None:
            raise result.error
        completion = ChatCompletion(
            id=self._request_id,
            created=self._created,
            model=self._front.model,
            choices=[self._choice(output) for output in result.outputs],
            usage=usage(self._batch, self._num_output_tokens),
        )
        if self._tells_prompt_scores:
            completion.prompt_logprobs = prompt_logprobs(result.prompt_logprobs)
        if self._body.return_token_ids:
            completion.prompt_token_ids = self._batch.prompts[0].token_ids
        return completion

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        self._num_output_tokens += len(output.token_ids)
        answer = self._answers[output.index]
        message = joined(self._shown([*answer.push(output.text), *answer.end()]))
        choice = ChatChoice(
            index=output.index,
            message=message,
            logprobs=self._logprobs(output),
            finish_reason=answer.finish_reason(output.finish_reason),
            stop_reason=stop_reason(output),
        )
        if self._body.return_token_ids:
            choice.token_ids, choice.weight_epochs = output.token_ids, output.weight_epochs
        return choice

    async def events(self, parts: AsyncIterator[Part]) -> AsyncGenerator[bytes]:
        """Raises the error that ended it, after what was told before."""
        async for _, output in parts:
            if isinstance(output, PerdureError):
                raise output
            for one in output.outputs:
                for choice in self._chunk_choices(one):
                    yield self._chunk([choice], output if choice.finish_reason is not None else None)
            if output.error is not None:
                raise output.error
        if asks_usage(self._body):
            yield event(self._told([], usage(self._batch, self._num_output_tokens)))

    def _chunk_choices(self, output: CompletionOutput) -> list[ChatChunkChoice]:
        """The deltas of one part: scores and ids are with the first of them, the ending with the last."""
        self._num_output_tokens += len(output.token_ids)
        answer = self._answers[output.index]
        deltas = answer.push(output.text)
        ends = output.finish_reason is not None
        if ends:
            deltas += answer.end()
        deltas = self._shown(deltas)
        if output.index not in self._begun:
            self._begun.add(output.index)
            deltas.insert(0, ChatMessage(role="assistant", content=""))
        scores = self._logprobs(output) if output.token_ids else None
        if not deltas and (ends or scores is not None or self._body.return_token_ids):
            deltas.append(ChatMessage())
        choices = [ChatChunkChoice(index=output.index, delta=delta) for delta in deltas]
        if choices:
            choices[0].logprobs = scores
            if self._body.return_token_ids:
                choices[0].token_ids, choices[0].weight_epochs = output.token_ids, output.weight_epochs
        if ends:
            choices[-1].finish_reason = answer.finish_reason(output.finish_reason)
            choices[-1].stop_reason = stop_reason(output)
        return choices

    def _chunk(self, choices: list[ChatChunkChoice], last: RequestOutput | None) -> bytes:
        chunk = self._told(choices, usage_so_far(self._body, self._batch, self._num_output_tokens))
        if self._body.return_token_ids and choices[0].delta.role is not UNSET:
            chunk.prompt_token_ids = self._batch.prompts[0].token_ids
        if self._tells_prompt_scores and last is not None and last.finished:
            chunk.prompt_logprobs = prompt_logprobs(last.prompt_logprobs)
        return event(chunk)

    def _told(self, choices: list[ChatChunkChoice], used: Usage | None | UnsetType) -> ChatChunk:
        return ChatChunk(
            id=self._request_id, created=self._created, model=self._front.model, choices=choices, usage=used
        )

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs or output.logprobs is None:
            return None
        num_top, listed_ids = self._body.top_logprobs or 0, self._body.logprob_token_ids or ()
        return chat_logprobs(self._names, output.token_ids, output.logprobs, num_top, listed_ids)

    def _shown(self, deltas: list[ChatMessage]) -> list[ChatMessage]:
        """Without reasoning, where that is not wanted."""
        if self._body.include_reasoning is not False:
            return deltas
        return [delta for delta in deltas if delta.reasoning_content is UNSET]
