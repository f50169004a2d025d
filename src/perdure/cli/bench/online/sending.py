"""Requests as a client sends them, and when their parts came: `Outcome`s, one a request. Nothing is judged here.

- A request's clock starts when it is sent: what waits here for `max_concurrency` has not begun.
- A part is an event with text, reasoning or a call of a tool; its first is the first token. Servers may put several
  tokens into one part: how many there are in all is what the server's `usage` says, else the parts are counted.
- Every failure has a name, under which it is counted: an error is a result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from perdure import InvalidValue
from perdure.cli.bench.online.traffic import Planned


@dataclass(frozen=True)
class Target:
    """A server. endpoint: "completions" or "chat". model: by its name there."""

    url: str
    endpoint: str
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    ignore_eos: bool = True
    temperature: float | None = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, one: Planned) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model": self.model,
            "max_tokens": one.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            asked["messages"] = [{"role": "user", "content": one.prompt}]
        else:
            asked["prompt"] = one.prompt
        if self.temperature is not None:
            asked["temperature"] = self.temperature
        if self.ignore_eos:
            asked["ignore_eos"] = True
        return asked | self.extra


@dataclass
class Outcome:
    """Times are seconds since the beginning of the run. part_times: of each part. num_input, num_output: None = the
    server did not tell. error: why it failed."""

    planned_at: float
    sent_at: float = 0.0
    ended_at: float = 0.0
    part_times: list[float] = field(default_factory=list)
    num_input: int | None = None
    num_output: int | None = None
    error: str | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: Delta = Delta()
    finish_reason: str | None = None

    @property
    def is_part(self) -> bool:
        delta = self.delta
        return bool(self.text or delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class StreamEvent(msgspec.Struct, frozen=True):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(StreamEvent).decode


async def drive(
    target: Target,
    requests: Sequence[Planned],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """All of them, each sent when it is due. In their order."""
    slots = asyncio.Semaphore(max_concurrency or len(requests))
    async with client(target) as http:
        begun = time.perf_counter()

        async def run(one: Planned, at: float) -> Outcome:
            await asyncio.sleep(begun + at - time.perf_counter())
            outcome = Outcome(at)
            async with slots:
                await _ask(http, target, one, outcome, begun)
            on_end(outcome)
            return outcome

        return await asyncio.gather(*(run(one, at) for one, at in zip(requests, arrivals, strict=True)))


def client(target: Target) -> httpx.AsyncClient:
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        base_url=target.url, headers=target.headers, timeout=target.timeout_s, limits=unlimited, trust_env=False
    )


async def _ask(http: httpx.AsyncClient, target: Target, one: Planned, outcome: Outcome, begun: float) -> None:
    content = msgspec.json.encode(target.body(one))
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    outcome.sent_at = time.perf_counter() - begun
    try:
        async with http.stream("POST", target.path, content=content, headers=headers) as answer:
            if answer.status_code != 200:
                outcome.error = f"HTTP {answer.status_code}: {_message(await answer.aread())}"
            else:
                outcome.error = await _follow(answer, outcome, begun)
    except httpx.HTTPError as error:
        outcome.error = type(error).__name__
    except msgspec.DecodeError:
        outcome.error = "an event is not what OpenAI's interface has"
    outcome.ended_at = time.perf_counter() - begun


async def _follow(answer: httpx.Response, outcome: Outcome, begun: float) -> str | None:
    """Note what comes and when. Returns what went wrong."""
    left, has_ended = b"", False
    async for data in answer.aiter_bytes():
        now = time.perf_counter() - begun
        *lines, left = (left + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            value = line[5:].strip()
            if value == b"[DONE]":
                has_ended = True
                continue
            event = _event(value)
            if event.error is not None:
                return f"in the stream: {_worded(event.error)}"
            if event.usage is not None:
                outcome.num_input, outcome.num_output = event.usage.prompt_tokens, event.usage.completion_tokens
            for choice in event.choices:
                if choice.is_part:
                    outcome.part_times.append(now)
                if choice.finish_reason is not None:
                    has_ended = True
                if choice.finish_reason == "error":
                    return "in the stream: finish_reason error"
    return None if has_ended else "the stream ended before its last event"


def _message(body: bytes) -> str:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        found = body.decode(errors="replace")
    return _worded(found.get("error", found) if isinstance(found, dict) else found)


def _worded(error: Any) -> str:
    """Short, so that equal failures are counted together."""
    text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return " ".join(text.split())[:100]


class Card(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class Cards(msgspec.Struct, frozen=True):
    data: list[Card]


def served(url: str, headers: dict[str, str], model: str | None) -> Card:
    """The model that is asked: the one named, else the first that is there. Raises `InvalidValue`."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=30, trust_env=False)
        if answer.status_code != 200:
            raise InvalidValue(f"--url={url}: HTTP {answer.status_code}: {_message(answer.content)}")
        cards = msgspec.json.decode(answer.content, type=Cards).data
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
        raise InvalidValue(f"--url={url}: no server with OpenAI's interface answers there ({error})") from None
    found = [card for card in cards if model is None or card.id == model]
    if not found:
        names = ", ".join(card.id for card in cards) or "nothing"
        raise InvalidValue(f"--model={model!r} is not served at {url}: {names}" if model else f"{url} serves nothing")
    return found[0]
