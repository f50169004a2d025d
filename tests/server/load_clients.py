"""The clients of `load.py`: what they ask, how they behave, and what they count."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from perdure import LLM, SamplingParams

MAX_BODY_BYTES = 50_000
MALFORMED = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": "a", "top_p": 7}',
    b'{"prompt": [1, "a"]}',
    b'{"prompt": "a", "what": 1}',
    b"\xff\xfe",
    b'{"prompt": []}',
)
BEHAVIOURS = {"whole": 73, "leaves": 10, "slow": 6, "aborts": 4, "malformed": 4, "oversized": 3}
"""Of 100 requests."""


@dataclass(frozen=True)
class Asked:
    """One of the few requests that are sent again and again, and its answer."""

    body: dict[str, Any]
    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str


@dataclass
class Report:
    """What the clients saw. wrong: answers that differ, and what was answered in another way than it should be."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """The server's last lines."""
    num_events: int = 0
    num_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    num_kills: int = 0
    elapsed_s: float = 0.0
    """Until the last answer: requests that have begun are waited for."""
    rss_bytes: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the load began, and the memory of the server and its children."""

    def figures(self) -> dict[str, Any]:
        times = sorted(self.first_token_s) or [0.0]
        return {
            "until_the_last_answer_s": round(self.elapsed_s, 1),
            "requests": dict(sorted(self.counts.items())),
            "wrong": self.wrong[:20],
            "num_wrong": len(self.wrong),
            **({"said": self.said} if self.wrong else {}),
            "replicas_killed": self.num_kills,
            "events": self.num_events,
            "output_tokens": self.num_tokens,
            "output_tokens_per_s": round(self.num_tokens / max(self.elapsed_s, 1e-9), 1),
            "time_to_first_token_s": {
                "median": round(statistics.median(times), 3),
                "p99": round(times[len(times) * 99 // 100], 3),
            },
            "rss_mb_of_each_minute": [round(value / 1e6, 1) for value in self.rss_of_minutes()],
        }

    def rss_of_minutes(self) -> list[float]:
        """The median of each: a replica that has just been killed counts little."""
        minutes: dict[int, list[int]] = {}
        for at, value in self.rss_bytes:
            minutes.setdefault(int(at // 60), []).append(value)
        return [statistics.median(values) for _, values in sorted(minutes.items())]


def what_is_asked(model: str | None, count: int, max_tokens: int, seed: int = 7) -> list[Asked]:
    """With the answers of an engine that is driven directly, one request at a time, without a prefix cache."""
    draw = random.Random(seed)
    found = []
    with LLM(model, enable_prefix_caching=False) as llm:
        width = min(llm.vocab_size, 20_000)
        common = [draw.randrange(width) for _ in range(24)]
        for at in range(count):
            own = [draw.randrange(width) for _ in range(draw.randrange(4, 40))]
            prompt = common + own if at % 2 else own
            settings: dict[str, Any] = {
                "max_tokens": draw.randrange(max_tokens // 2, max_tokens + 1),
                "temperature": (0.0, 0.8, 1.0)[at % 3],
                "seed": at,
                "ignore_eos": at % 4 != 0,
                "logprobs": 1 if at % 3 == 0 else None,
            }
            [result] = llm.generate([prompt], SamplingParams(**settings))
            output = result.outputs[0]
            body = {**settings, "prompt": prompt, "return_token_ids": True}
            found.append(
                Asked(
                    body,
                    output.text,
                    output.token_ids,
                    None if settings["logprobs"] is None else output.selected_logprobs,
                    str(output.finish_reason),
                )
            )
    return found


class Clients:
    """So many at once, each with one request after another until the time is over."""

    def __init__(self, url: str, asked: list[Asked], report: Report, seed: int) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))
        self._asked = asked
        self._report = report
        self._draw = random.Random(seed)
        self._num_ids = 0
        self._begun = time.monotonic()

    async def run(self, count: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        async with self._http:
            await asyncio.gather(*(self._client(until) for _ in range(count)))

    async def _client(self, until: float) -> None:
        while time.monotonic() < until:
            [behaviour] = self._draw.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))
            try:
                await getattr(self, f"_{behaviour}")()
            except Exception as error:
                at = time.monotonic() - self._begun
                self._report.wrong.append(f"{behaviour} after {at:.1f} s: {type(error).__name__}: {error}")
            self._report.counts[behaviour] += 1

    async def _whole(self, pause_s: float = 0.0) -> None:
        asked = self._draw.choice(self._asked)
        if self._draw.random() < 0.2 and not pause_s:
            answer = await self._http.post("/v1/completions", json=asked.body)
            self._compare(asked, answer.status_code, answer.json()["choices"])
            return
        choices: list[dict[str, Any]] = []
        begun = time.monotonic()
        body = {**asked.body, "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    if not choices:
                        self._report.first_token_s.append(time.monotonic() - begun)
                    choices += json.loads(line.removeprefix("data: "))["choices"]
                    self._report.num_events += 1
                    await asyncio.sleep(pause_s)
        assert line == "" or line == "data: [DONE]", line
        self._compare(asked, answer.status_code, choices)

    async def _slow(self) -> None:
        await self._whole(self._draw.uniform(0.02, 0.2))

    async def _leaves(self) -> None:
        asked, wanted = self._draw.choice(self._asked), self._draw.randrange(1, 12)
        choices: list[dict[str, Any]] = []
        body = {**asked.body, "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choices += json.loads(line.removeprefix("data: "))["choices"]
                    if len(choices) >= wanted:
                        break
        self._compare_begun(asked, choices)

    async def _aborts(self) -> None:
        """By its id, which is used again at once."""
        asked, wanted = self._draw.choice(self._asked), self._draw.randrange(1, 12)
        self._num_ids += 1
        name = f"load-{self._num_ids}"
        choices: list[dict[str, Any]] = []
        again: asyncio.Task[None] | None = None
        body = {**asked.body, "stream": True, "request_id": name}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choices += json.loads(line.removeprefix("data: "))["choices"]
                    if len(choices) == wanted:
                        assert (await self._http.post("/abort", json={"request_ids": [name]})).status_code == 200
                        again = asyncio.create_task(self._again(asked, name))
        self._compare_begun(asked, choices)
        if choices[-1]["finish_reason"] not in ("abort", asked.finish_reason):
            self._report.wrong.append(f"aborted, and ended by {choices[-1]['finish_reason']}")
        if again is not None:
            await again

    async def _again(self, asked: Asked, name: str) -> None:
        answer = await self._http.post("/v1/completions", json={**asked.body, "request_id": name})
        self._compare(asked, answer.status_code, answer.json().get("choices", []))

    async def _malformed(self) -> None:
        answer = await self._http.post("/v1/completions", content=self._draw.choice(MALFORMED))
        self._expect(answer, 400)

    async def _oversized(self) -> None:
        answer = await self._http.post("/v1/completions", json={"prompt": "a" * 2 * MAX_BODY_BYTES})
        self._expect(answer, 413)

    def _expect(self, answer: httpx.Response, status: int) -> None:
        if answer.status_code != status or set(answer.json()) != {"error"}:
            self._report.wrong.append(f"status {answer.status_code} for {status}: {answer.text[:200]}")

    def _compare_begun(self, asked: Asked, choices: list[dict[str, Any]]) -> None:
        """What came before it was left, or aborted, is how the answer begins."""
        token_ids = [token_id for choice in choices for token_id in choice["token_ids"]]
        if not choices or token_ids != asked.token_ids[: len(token_ids)]:
            self._report.wrong.append(f"{token_ids} does not begin {asked.token_ids}")

    def _compare(self, asked: Asked, status: int, choices: list[dict[str, Any]]) -> None:
        token_ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
        self._report.num_tokens += len(token_ids)
        scores: list[float] | None = None
        for choice in choices:
            if choice.get("logprobs") is not None:
                scores = (scores or []) + choice["logprobs"]["token_logprobs"]
        found = Asked(
            asked.body,
            "".join(choice.get("text", "") for choice in choices),
            token_ids,
            scores,
            str(choices[-1].get("finish_reason")) if choices else "none",
        )
        if status != 200 or found != asked:
            self._report.wrong.append(f"status {status}: {found} instead of {asked}"[:1000])
