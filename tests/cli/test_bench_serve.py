"""`perdure bench serve`: what it asks and when, that its figures are what a server did, and how failures are counted.

The server of most tests is a fake that notes when it got each request and sent each part, on the same clock.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from perdure import InvalidValue
from perdure.cli.bench.online import report, traffic
from perdure.cli.bench.online.sending import Outcome, Target, drive
from perdure.cli.bench.online.traffic import Asked, Planned
from tests.server.conftest import running

ROOM_MS = 1500.0
"""By so much a loaded machine may take longer to notice what was sent."""
FIRST_S, GAP_S = 0.12, 0.03


class Fake:
    """Answers with as many parts as tokens were asked; `failing` says which requests, by their number, fail how."""

    def __init__(self, failing: dict[int, str] | None = None, tells_usage: bool = True) -> None:
        self.failing = failing or {}
        self.tells_usage = tells_usage
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: dict[int, list[float]] = {}
        """Of each request: its arrival, and each part."""
        self.num_now = self.most = 0
        self.url = ""

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake", "max_model_len": 4096, "owned_by": "us"}]})

    async def answer(self, request: Request) -> Response:
        times = [time.perf_counter()]
        body = json.loads(await request.body())
        number = len(self.bodies)
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.times[number] = times
        how = self.failing.get(number)
        if how == "429":
            return JSONResponse({"error": {"message": "the queue is full", "type": "x", "code": 7}}, 429)
        is_chat = request.url.path.endswith("chat/completions")
        return StreamingResponse(self._parts(body, times, how, is_chat), media_type="text/event-stream")

    async def _parts(self, body: dict[str, Any], times: list[float], how: str | None, is_chat: bool) -> Any:
        def event(**fields: Any) -> str:
            return f"data: {json.dumps({'id': 'x', 'object': 'y', **fields})}\n\n"

        def part(text: str, reason: str | None = None) -> str:
            said = {"delta": {"content": text}} if is_chat else {"text": text}
            return event(choices=[{"index": 0, "finish_reason": reason, **said}], usage=None)

        self.num_now += 1
        self.most = max(self.most, self.num_now)
        try:
            if is_chat:
                yield part("")
            count = body["max_tokens"]
            for at in range(count):
                await asyncio.sleep(GAP_S if at else FIRST_S)
                if at == 1 and how == "breaks":
                    return
                if at == 1 and how == "error":
                    yield event(error={"message": "a step failed", "code": 500})
                    return
                times.append(time.perf_counter())
                yield part(" word", "length" if at == count - 1 else None)
            if self.tells_usage:
                yield event(
                    choices=[], usage={"prompt_tokens": 11, "completion_tokens": count, "total_tokens": 11 + count}
                )
            yield "data: [DONE]\n\n"
        finally:
            self.num_now -= 1

    def seconds(self, number: int) -> list[float]:
        """Of each part since the request came."""
        begin, *parts = self.times[number]
        return [at - begin for at in parts]


@contextmanager
def faking(**settings: Any) -> Iterator[Fake]:
    fake = Fake(**settings)
    routes = [Route("/v1/models", fake.models)]
    routes += [Route(path, fake.answer, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield fake
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def measured(perdure, tmp_path):
    """Runs the command against a server; gives what was printed and the report."""

    def run(url, *arguments):
        file = tmp_path / "report.json"
        done = perdure("bench", "serve", *arguments, "--url", url, "--json", file)
        assert done.code == 0, done.err
        return done, json.loads(file.read_text())

    return run


def near(found: float, did: float) -> bool:
    """The client cannot see a part before it was sent."""
    return did - 1.0 <= found <= did + ROOM_MS


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_figures_are_what_the_server_did(measured, endpoint: str) -> None:
    arguments = ["--num-prompts", 4, "--output-len", 5, "--input-len", 9, "--endpoint", endpoint, "--warm-up", 0]
    limits = ["--goodput", "ttft:20000,tpot:20000", "--goodput", "e2el:1"]
    with faking() as fake:
        done, found = measured(fake.url, *arguments, *limits, "--api-key", "secret")
        assert measured(fake.url, *arguments, "--goodput", "e2el:60000")[1]["request_goodput"] > 0
    assert fake.keys[0] == "Bearer secret"
    parts = [fake.seconds(number) for number in range(4)]
    first = [1000 * one[0] for one in parts]
    by_token = [1000 * (one[-1] - one[0]) / 4 for one in parts]
    assert min(first) >= 1000 * FIRST_S and min(by_token) >= 1000 * GAP_S * 0.99
    assert near(found["ttft_ms"]["mean"], statistics.mean(first)) and near(found["ttft_ms"]["most"], max(first))
    assert near(found["e2el_ms"]["median"], statistics.median(1000 * one[-1] for one in parts))
    assert abs(found["tpot_ms"]["mean"] - statistics.mean(by_token)) < ROOM_MS / 4
    assert found["itl_ms"]["mean"] == pytest.approx(found["tpot_ms"]["mean"], rel=1e-6), "a token a part"
    assert (found["completed"], found["failed"], found["errors"]) == (4, 0, {})
    assert (found["total_input_tokens"], found["total_output_tokens"], found["output_tokens_by"]) == (44, 20, "usage")
    assert found["duration"] * 1000 >= found["e2el_ms"]["most"]
    for name, count in (("request", 4), ("input", 44), ("output", 20), ("total_token", 64)):
        assert found[f"{name}_throughput"] == pytest.approx(count / found["duration"])
    assert found["goodput_limits"] == {"ttft": 20000, "tpot": 20000, "e2el": 1} and found["request_goodput"] == 0
    for number in range(4):
        body = fake.bodies[number]
        assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["temperature"]) == (5, True, True, 0)
    assert "4 of 4  requests answered" in done.out and "to the first token (TTFT), ms" in done.out


def test_failures_are_counted_by_name(measured) -> None:
    failing = {1: "429", 2: "breaks", 3: "error", 4: "429"}
    with faking(failing=failing) as fake:
        done, found = measured(fake.url, "--num-prompts", 5, "--output-len", 3, "--max-concurrency", 1, "--warm-up", 0)
    assert found["errors"] == {
        "HTTP 429: the queue is full": 2,
        "the stream ended before its last event": 1,
        "in the stream: a step failed": 1,
    }
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (1, 4, 3)
    assert "4 failed" in done.out and "2  HTTP 429: the queue is full" in done.out


def test_without_usage_parts_are_counted(measured) -> None:
    with faking(tells_usage=False) as fake:
        done, found = measured(fake.url, "--num-prompts", 2, "--output-len", 3)
    assert (found["output_tokens_by"], found["total_output_tokens"], found["total_input_tokens"]) == ("parts", 6, None)
    assert found["input_throughput"] is None and "output tokens/s, by parts" in done.out
    assert len(fake.bodies) == 3, "one to warm up"


def test_no_more_at_a_time_than_asked(measured) -> None:
    with faking() as fake:
        found = measured(fake.url, "--num-prompts", 5, "--output-len", 1, "--max-concurrency", 2)[1]
    assert fake.most <= 2 and found["max_concurrent_requests"] == 2


def test_requests_are_sent_when_they_are_due(measured, tmp_path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [
        "2023-11-16 18:15:46.6805900,374,4",
        "2023-11-16 18:15:47.6805900,5000,9",
        "2023-11-16 18:15:48.6805900,3,2",
    ]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    with faking() as fake:
        done, found = measured(fake.url, "azure", "--data", trace, "--speed", 10, "--warm-up", 0)
    assert [(len(body["prompt"]), body["max_tokens"]) for body in fake.bodies] == [(374, 4), (3, 2)]
    assert found["num_left_out"] == 1
    assert "1 requests of the workload were left out" in done.out
    chosen = traffic.planned(Asked(workload="azure", data=trace, speed=10, limit=4096))
    times = traffic.arrivals(chosen, float("inf"), seed=0)
    with faking() as fake:
        outcomes = asyncio.run(drive(Target(fake.url, "completions", "fake"), chosen.requests, times, None))
    assert times == [0.0, pytest.approx(0.2)] and [one.planned_at for one in outcomes] == times
    assert all(one.sent_at >= one.planned_at - 0.001 and one.error is None for one in outcomes)


def test_our_own_server(measured, tiny: Path) -> None:
    arguments = ["shared-prefix", "--num-prompts", 6, "--prefix-len", 64, "--input-len", 8, "--output-len", 7]
    with running(tiny, {"api_keys": ("user",)}, num_pages=256) as server:
        for endpoint in ("completions", "chat"):
            found = measured(server.url, *arguments, "--endpoint", endpoint, "--api-key", "user")[1]
            assert (found["completed"], found["errors"], found["total_output_tokens"]) == (6, {}, 42)
            assert found["total_input_tokens"] == 6 * 72 or endpoint == "chat"
            assert 0 < found["ttft_ms"]["mean"] <= found["e2el_ms"]["mean"] and found["tpot_ms"]["mean"] > 0


def take(count: int, workload: str, **asked: Any) -> list[Planned]:
    return traffic.planned(Asked(workload=workload, num_prompts=count, **asked)).requests


def test_the_workloads(tmp_path: Path) -> None:
    fixed = take(20, "random", input_len=30, output_len=7)
    assert {(len(one.prompt), one.output_len) for one in fixed} == {(30, 7)}
    assert (
        fixed
        == take(20, "random", input_len=30, output_len=7)
        != take(20, "random", input_len=30, output_len=7, seed=1)
    )
    varied = [len(one.prompt) for one in take(300, "random", input_len=100, range_ratio=0.5)]
    assert min(varied) in range(50, 60) and max(varied) in range(140, 151)
    texts = take(3, "random", input_len=12, as_ids=False)
    assert all(isinstance(one.prompt, str) and len(one.prompt.split()) == 12 for one in texts)

    shared = [one.prompt for one in take(6, "shared-prefix", prefix_len=40, input_len=5, num_prefixes=2)]
    assert len({tuple(prompt[:40]) for prompt in shared}) == 2 and len({tuple(prompt) for prompt in shared}) == 6

    drawn = take(3000, "sharegpt")
    assert 190 < statistics.mean(len(one.prompt) for one in drawn) < 250
    assert 180 < statistics.mean(one.output_len for one in drawn) < 230
    file = tmp_path / "sharegpt.json"
    turns = [
        [("human", "a question"), ("gpt", "x" * 40), ("human", "more")],
        [("human", "alone")],
        [("gpt", ""), ("human", "y")],
    ]
    file.write_text(
        json.dumps([{"id": "1", "conversations": [{"from": who, "value": said} for who, said in one]} for one in turns])
    )
    assert take(5, "sharegpt", data=file) == [Planned("a question", 10)]

    chosen = traffic.planned(Asked(workload="sharegpt", num_prompts=50, limit=300))
    assert len(chosen.requests) == 50 and chosen.num_left_out > 0
    assert max(len(one.prompt) + one.output_len for one in chosen.requests) <= 300
    with pytest.raises(InvalidValue, match="max_model_len=100"):
        take(1, "random", input_len=100, limit=100)


def test_arrivals_are_a_poisson_process() -> None:
    chosen = traffic.Traffic(take(4000, "random", input_len=1, output_len=1))
    times = traffic.arrivals(chosen, 20.0, seed=0)
    gaps = [after - before for before, after in pairwise(times)]
    assert (
        times[0] == 0
        and 0.045 < statistics.mean(gaps) < 0.055
        and 0.9 < statistics.stdev(gaps) / statistics.mean(gaps) < 1.1
    )
    assert times == traffic.arrivals(chosen, 20.0, seed=0) != traffic.arrivals(chosen, 20.0, seed=1)
    assert set(traffic.arrivals(chosen, float("inf"), seed=0)) == {0.0}


def test_spreads_and_goodput() -> None:
    found = report.spread([float(value) for value in range(1, 102)])
    assert found is not None and (found.mean, found.median, found.p90, found.p99) == (51, 51, 91, 100)
    assert (found.least, found.most) == (1, 101) and report.spread([]) is None
    outcomes = [
        Outcome(0, sent_at=0, ended_at=2, part_times=[1, 1.5, 2], num_input=4, num_output=5),
        Outcome(0, sent_at=1, ended_at=4, part_times=[1.1, 4], num_input=4, num_output=2),
        Outcome(0, sent_at=3.5, ended_at=3.6, error="HTTP 500: no"),
    ]
    told = report.reported(
        outcomes, date="", setup={}, client_cpu_s=0, num_left_out=0, goodput=report.goodput_from(["ttft:500"])
    )
    assert (told.ttft_ms.least, told.ttft_ms.most) == (pytest.approx(100), 1000)
    assert (told.tpot_ms.least, told.tpot_ms.most) == (250, pytest.approx(2900)), "by the tokens of usage, not by parts"
    assert told.max_concurrent_requests == 2 and told.request_goodput == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "workload='nothing' is none of random"),
        (["--endpoint", "images"], "--endpoint='images' is none of completions, chat"),
        (["--num-prompts", "0"], "--num-prompts=0 is not from 1"),
        (["--request-rate", "0"], "--request-rate=0 is not from"),
        (["--range-ratio", "2"], "--range-ratio=2 is not from 0 to 1"),
        (["--goodput", "ttft"], "--goodput: 'ttft' is not NAME:MS"),
        (["--goodput", "speed:3"], "'speed:3' is not NAME:MS"),
        (["--extra-body", "[1]"], "--extra-body='[1]' is no JSON object"),
        (["--model", "other"], "--model='other' is not served at"),
        (["azure", "--data", "nowhere.csv"], "--data=nowhere.csv: not a trace"),
        (["sharegpt", "--data", "nowhere.json"], "--data=nowhere.json: not conversations"),
        (["--url", "http://127.0.0.1:1"], "--url=http://127.0.0.1:1: no server with OpenAI's interface answers"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_asked(perdure, fake: Fake, arguments: list[str], words: str) -> None:
    given = arguments if "--url" in arguments else [*arguments, "--url", fake.url]
    done = perdure("bench", "serve", *given)
    assert (done.code, done.out) == (2, "") and words in done.err and not fake.bodies


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    with faking() as found:
        yield found
