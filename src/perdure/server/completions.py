"""`/v1/completions`: prompts continued, whole or as a stream of the same.

The output of sample c of prompt p is choice p * n + c. Of several prompts each may be refused alone: its choices say so
and the others go on; if all are, the request is.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from perdure import PerdureError, RequestOutput, SamplingParams
from perdure.api.output import CompletionOutput
from perdure.api.scores import TokenScores
from perdure.server import params, prompts
from perdure.server.batch import Batch, Part, unless_gone
from perdure.server.bodies import read
from perdure.server.errors import HTTPError, Words, as_http
from perdure.server.front import Front, is_id
from perdure.server.protocol.common import Usage
from perdure.server.protocol.completions import Completion, CompletionChoice, CompletionRequest, Logprobs
from perdure.server.replies import asks_usage, begun, chained, error_of, json_response, stop_reason, usage, usage_so_far
from perdure.server.scores import CompletionScores, Names, prompt_logprobs, text_pusher
from perdure.server.stream import EventStream, event


async def completions(front: Front, request: Request) -> Response:
    body = await read(request, CompletionRequest, front.config.max_body_bytes)
    front.check_model(body.model)
    request.state.words = words = params.words_of(body)
    name = body.request_id
    if body.checkpoint is not None:
        past = params.of_checkpoint(body)
        settings, asked = past.params, [prompts.of_checkpoint(past)]
        name = str(past.request_id) if body.request_id is None and is_id(past.request_id) else body.request_id
    elif body.prompt is None:
        raise HTTPError(400, "prompt is missing", param="prompt")
    else:
        settings = params.of_completion(body)
        asked = await prompts.of_completion(front.llm, body.prompt, body.add_special_tokens is not False)
    batch = await Batch.of(front, asked, settings, name, "cmpl", body.cache_salt)
    request_id = batch.request_id
    answer = _Answer(front, body, settings, words, batch, request_id)
    if not body.stream:
        results = await unless_gone(request, batch.results(), batch.abort)
        return json_response(answer.whole(results), request_id)
    parts = batch.parts()
    first = await unless_gone(request, begun(parts), batch.abort)
    return EventStream(answer.events(chained(first, parts)), batch.abort, {"X-Request-Id": request_id})


class _Answer:
    """What becomes of the engine's results, choice by choice."""

    def __init__(
        self,
        front: Front,
        body: CompletionRequest,
        settings: SamplingParams,
        words: Words,
        batch: Batch,
        request_id: str,
    ) -> None:
        self._front = front
        self._body = body
        self._settings = settings
        self._words = words
        self._batch = batch
        self._request_id = request_id
        self._created = int(time.time())
        began_before = batch.prompts[0].checkpoint is not None
        self._tells_prompt_scores = (settings if began_before else body).prompt_logprobs is not None
        self._num_output_tokens = 0
        self._begun: set[int] = set()
        """Choices of which something was told."""
        self._held: dict[int, list[CompletionChoice]] = {}
        """By prompt: the last of samples that ended before others."""
        tokenizer, skips = front.llm.tokenizer, settings.skip_special_tokens
        names = Names(tokenizer, bool(body.return_tokens_as_token_ids))
        choices = range(settings.n * len(batch.prompts)) if settings.asks_scores else ()
        self._scores = [CompletionScores(names, text_pusher(tokenizer, skips)) for _ in choices]

    def whole(self, results: list[RequestOutput | PerdureError]) -> Completion:
        """Raises the first error if there is nothing else to tell."""
        errors = [error_of(result) for result in results]
        if errors[0] is not None and None not in errors:
            raise errors[0]
        choices: list[CompletionChoice] = []
        for at, result in enumerate(results):
            choices += self._choices(at, result, None if isinstance(result, PerdureError) else result.prompt_logprobs)
        return self._told(choices, usage(self._batch, self._num_output_tokens))

    async def events(self, parts: AsyncIterator[Part]) -> AsyncGenerator[bytes]:
        """With the scores of an echoed prompt nothing is told before these are known, which is at the end."""
        if self._body.echo and self._settings.asks_scores:
            held = [part async for part in parts]
            scores = {at: out.prompt_logprobs for at, out in held if isinstance(out, RequestOutput) and out.finished}
            for part in held:
                for chunk in self._chunks(part, scores.get(part.prompt)):
                    yield chunk
        else:
            async for part in parts:
                for chunk in self._chunks(part, None):
                    yield chunk
        if asks_usage(self._body):
            yield event(self._told([], usage(self._batch, self._num_output_tokens)))

    def _chunks(self, part: Part, prompt_scores: TokenScores | None) -> list[bytes]:
        found = []
        for choice in self._told_whole(part, self._choices(part.prompt, part.output, prompt_scores)):
            says = choice.text or choice.finish_reason or choice.logprobs or choice.token_ids
            if not says and choice.prompt_token_ids is UNSET:
                continue
            used = usage_so_far(self._body, self._batch, self._num_output_tokens)
            found.append(event(self._told([choice], used)))
        return found

    def _told_whole(self, part: Part, choices: list[CompletionChoice]) -> list[CompletionChoice]:
        """The last of each sample waits for the prompt's scores, which come with the last sample's."""
        output, held = part.output, self._held.setdefault(part.prompt, [])
        if not self._tells_prompt_scores or isinstance(output, PerdureError):
            return choices
        if not output.finished:
            held += [choice for choice in choices if choice.finish_reason is not None]
            return [choice for choice in choices if choice.finish_reason is None]
        for choice in held:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return [*held, *choices]

    def _choices(
        self, at: int, output: RequestOutput | PerdureError, prompt_scores: TokenScores | None
    ) -> list[CompletionChoice]:
        """Of a whole result or of a part. prompt_scores: for the echo."""
        if isinstance(output, PerdureError):
            return self._refused(at, output)
        found = [self._choice(at, one, prompt_scores) for one in output.outputs]
        for choice in found:
            if self._tells_prompt_scores and output.finished:
                choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
            if output.error is not None and choice.finish_reason == "error":
                choice.error = as_http(output.error, self._words).detail
        return found

    def _refused(self, at: int, error: PerdureError) -> list[CompletionChoice]:
        n, detail = self._settings.n, as_http(error, self._words).detail
        return [
            CompletionChoice(index=at * n + child, text="", finish_reason="error", error=detail) for child in range(n)
        ]

    def _choice(self, at: int, output: CompletionOutput, prompt_scores: TokenScores | None) -> CompletionChoice:
        index = at * self._settings.n + output.index
        choice = CompletionChoice(
            index=index, text=output.text, finish_reason=output.finish_reason, stop_reason=stop_reason(output)
        )
        self._num_output_tokens += len(output.token_ids)
        if self._body.return_token_ids:
            choice.token_ids, choice.weight_epochs = output.token_ids, output.weight_epochs
        begins = index not in self._begun
        if begins:
            self._begun.add(index)
            self._begin(choice, at)
        if self._scores:
            choice.logprobs = self._logprobs(at, output, prompt_scores, begins)
        return choice

    def _begin(self, choice: CompletionChoice, at: int) -> None:
        prompt = self._batch.prompts[at]
        if self._body.return_token_ids:
            choice.prompt_token_ids = prompt.token_ids
        if self._body.echo:
            choice.text = self._echo(at) + choice.text

    def _echo(self, at: int) -> str:
        prompt, tokenizer = self._batch.prompts[at], self._front.llm.tokenizer
        if prompt.text is not None or tokenizer is None:
            return prompt.text or ""
        return tokenizer.decode(prompt.token_ids, self._settings.skip_special_tokens)

    def _logprobs(self, at: int, output: CompletionOutput, prompt_scores: TokenScores | None, begins: bool) -> Logprobs:
        scores = self._scores[at * self._settings.n + output.index]
        token_ids: list[int] = []
        entries: list[Any] = []
        if begins and self._body.echo and prompt_scores is not None:
            token_ids, entries = list(self._batch.prompts[at].token_ids), list(prompt_scores)
        if output.logprobs is not None:
            entries += output.logprobs
            token_ids += output.token_ids
        return scores.part(token_ids, entries)

    def _told(self, choices: list[CompletionChoice], used: Usage | None | UnsetType) -> Completion:
        return Completion(
            id=self._request_id, created=self._created, model=self._front.model, choices=choices, usage=used
        )
