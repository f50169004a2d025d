"""The page at `/`: what it is told, and a browser that looks, chats, and sees a pause and the loss of a replica."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from perdure import EngineDead, SamplingParams, StateError
from perdure.api.moment import RequestEvent
from perdure.api.output import Replicas, RequestMetrics, Stats
from perdure.server import feed
from perdure.server.page import FILES
from tests.server.browser import CHROMIUM, Page, browsing
from tests.server.conftest import Running, running

PATH = "/v1/completions"
FOCUSABLE = {"button", "textbox", "spinbutton", "link", "DisclosureTriangle"}


def requests_of(server: Running) -> dict[str, Any]:
    found = server.http.get("/state/live")
    assert found.status_code == 200, found.text
    return {one["request_id"]: one for one in found.json()["requests"]}


def wait_for(server: Running, name: str, **holds: Any) -> Any:
    def is_so(stats: Any) -> bool:
        one = requests_of(server).get(name)
        return one is not None and all(one[field] == value for field, value in holds.items())

    server.wait_until(is_so)
    return requests_of(server)[name]


def test_a_request_is_followed_to_its_end(server: Running) -> None:
    server.post("/pause")
    body = {"prompt": [256, 7, 8], "max_tokens": 5, "ignore_eos": True, "n": 2}
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(server.told, PATH, **body, request_id="whole"),
            pool.submit(server.stream, PATH, **body, request_id="parts"),
        ]
        held = wait_for(server, "whole", state="waiting")
        assert held["num_output_tokens"] is None and held["ended_s"] is None and held["reason"] is None
        assert wait_for(server, "parts", state="waiting")["num_output_tokens"] == 0
        assert server.http.get("/state/live").json()["stats"]["state"] == "paused"
        server.post("/resume")
        for call in calls:
            call.result()
    for name in ("whole", "parts"):
        one = wait_for(server, name, state="ended")
        assert (one["num_prompt_tokens"], one["num_output_tokens"], one["n"], one["reason"]) == (3, 10, 2, "length")
        assert [state for state, _ in one["spans"]] == ["waiting", "prefill", "decode"]
        begun = [ago for _, ago in one["spans"]]
        assert one["age_s"] == pytest.approx(begun[0], abs=0.002) and begun == sorted(begun, reverse=True)
        assert begun[-1] >= one["ended_s"] >= 0
    live = server.http.get("/state/live").json()
    assert live["replicas"][0] | {"for_s": 0} == {"index": 0, "state": "serving", "num_requests": 0, "for_s": 0}
    assert live["stats"]["num_generated_tokens"] >= 20 and live["num_not_shown"] == 0


def test_requests_that_never_began_are_not_shown(server: Running) -> None:
    server.refused(PATH, prompt=[256] * 2000, request_id="refused")
    assert "refused" not in requests_of(server)
    assert not server.server.front.feed._live


def test_a_request_that_waits_for_pages_is_shown_so(tiny: Path) -> None:
    with running(tiny, {}, num_pages=8, paused_pages=8, enable_prefix_caching=False) as server:
        with ThreadPoolExecutor(2) as pool:
            body = {"max_tokens": 100, "ignore_eos": True}
            calls = [pool.submit(server.told, PATH, prompt=[256, at], request_id=f"r{at}", **body) for at in (5, 6)]
            assert {call.result()["usage"]["completion_tokens"] for call in calls} == {100}
        shown = [wait_for(server, f"r{at}", state="ended") for at in (5, 6)]
        assert any({"paused", "evicted"} & {state for state, _ in one["spans"]} for one in shown)


def test_spans_are_few_and_of_a_sample_that_goes_on() -> None:
    def metrics(*events: tuple[Any, ...]) -> RequestMetrics:
        return RequestMetrics(
            10.0, tuple(RequestEvent(kind, time, count, child) for kind, time, count, child in events)
        )

    assert feed._spans(metrics(), 1, 12.0) == [("waiting", 10.0)]
    chunks = [("chunk", 11.0 + at / 100, 1, 0) for at in range(99)]
    begun = [("queued", 10.0, 0, 0), ("scheduled", 11.0, 100, 0), *chunks]
    assert feed._spans(metrics(*begun), 1, 13.0) == [("waiting", 10.0), ("prefill", 11.0)]
    two = [*begun, ("chunk", 12.0, 1, 0), ("scheduled", 12.0, 0, 1), ("ended", 14.0, 3, 0), ("paused", 15.0, 0, 1)]
    assert feed._spans(metrics(*two), 2, 16.0) == [("waiting", 10.0), ("decode", 12.0), ("paused", 15.0)]
    moved = [*begun, ("chunk", 12.0, 1, 0), ("queued", 13.0, 0, 0), ("scheduled", 14.0, 105, 0)]
    assert feed._spans(metrics(*moved), 1, 15.0)[-3:] == [("decode", 12.0), ("evicted", 13.0), ("recompute", 14.0)]
    pauses = [(kind, 20.0 + at, 0, 0) for at in range(200) for kind in (("paused", "resumed")[at % 2],)]
    assert len(feed._spans(metrics(*begun, ("chunk", 12.0, 1, 0), *pauses), 1, 300.0)) == feed.MOST_SPANS


class Behind:
    """What a feed looks at. answers: to its questions, the last over and over; None = it never comes."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.num_asked = 0

    async def stats(self) -> Any:
        self.num_asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def replicas(self) -> Replicas:
        return Replicas([], {"r3": 7})


class Live:
    """A handle."""

    metrics = RequestMetrics(0.0, ())
    num_output_tokens = 4

    def __init__(self, name: str) -> None:
        self.request_id = name

    def add_done_callback(self, call: Any) -> None:
        self.end = call


STATS = Stats("running", 0, ["r1"], *[1] * 13)


def test_a_look_is_bounded_shared_and_waits_for_nobody() -> None:
    async def look() -> None:
        busy = Behind(STATS, StateError("no coordinator"), None)
        watched = feed.Feed(busy, "m")  # type: ignore[arg-type]
        handles = [Live(f"r{at}") for at in range(feed.MOST_SHOWN + 50)]
        for handle in handles:
            watched.follow(handle, 3, SamplingParams())
        first, second = await asyncio.gather(watched.look(False), watched.look(False))
        assert first is second and busy.num_asked == 1, "one serves both"
        assert (len(first.requests), first.num_not_shown) == (feed.MOST_SHOWN, 50)
        assert [one.replica for one in first.requests[2:4]] == [None, 7] and first.requests[1].state == "paused"
        for handle in handles:
            handle.end(None)  # refused: never seen again
        assert first.stats == STATS and first.stats_age_s < 5
        for _ in range(2):  # it cannot answer, then it does not
            watched._looked_at = 0.0
            late = await watched.look(True)
        assert late.stats == STATS and late.stats_age_s >= feed.PATIENCE_S and late.is_draining
        assert not late.requests and busy.num_asked == 3
        watched._looked_at = 0.0
        await watched.look(False)
        assert busy.num_asked == 3, "no second question while one is open"
        with pytest.raises(EngineDead):
            await feed.Feed(Behind(EngineDead("it died")), "m").look(False)  # type: ignore[arg-type]

    asyncio.run(look())


def test_the_files_load_nothing_from_elsewhere(server: Running) -> None:
    for path, (_, kind) in FILES.items():
        found = server.http.get(path)
        assert found.status_code == 200 and found.headers["content-type"].startswith(kind)
        assert found.headers["content-security-policy"].startswith("default-src 'self';")
        loaded = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", found.text)
        assert all(name.startswith("#") or f"/{name}" in {*FILES, "/metrics"} for name in loaded), loaded
    assert " style=" not in server.http.get("/").text


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with browsing() as found:
        yield found


def shown(name: str) -> str:
    return f"document.getElementById({json.dumps(name)}).innerText"


def test_a_browser_sees_a_request_a_pause_and_the_loss_of_a_replica(page: Page, tiny: Path) -> None:
    with running(tiny, {"served_model_name": "tiny"}, data_parallel_size=2) as server:
        page.resize(1200, 800)
        page.open(server.url)
        page.wait("document.getElementById('state').dataset.state == 'running'")
        page.wait("document.querySelectorAll('.replica[data-state=serving]').length == 2")
        assert page.run(shown("model")) == "tiny" and "0%" in page.run(shown("occupancy"))

        server.post("/pause")
        page.wait("document.getElementById('state').dataset.state == 'paused'")
        assert "paused" in page.run("document.getElementById('news').textContent")

        page.press("Tab", 9)
        assert page.run("document.activeElement.className") == "skip"
        page.press("Enter", 13, "\r")
        page.wait("document.activeElement.id == 'message'")
        page.run("document.getElementById('max-tokens').value = 12")
        page.type("Are you there?")
        page.press("Enter", 13, "\r")
        name = page.wait("document.querySelector('.request.own')?.dataset.request")
        assert name in requests_of(server)
        page.wait("document.querySelector('.request.own').innerText.includes('held')")
        assert page.run("document.querySelector('.turn.user').innerText").endswith("Are you there?")

        server.post("/resume")
        page.wait("document.querySelector('.turn.assistant .about')?.textContent.includes('12 tokens')")
        assert page.run("document.querySelector('.turn.assistant .said').textContent")
        page.wait("document.querySelector('.request.own').dataset.state == 'ended'")
        assert page.run("[...document.querySelectorAll('.request.own .span')].map(one => one.className)")[-1] == (
            "span decode"
        )
        page.wait("document.getElementById('state').dataset.state == 'running'")

        fleet = server.server.front.llm._engine.fleet  # type: ignore[attr-defined]
        fleet.leave()  # so that it stays lost
        os.kill(fleet.children[2].process.pid, signal.SIGKILL)
        page.wait("document.querySelector('.replica[data-state=lost]')?.dataset.index == '1'")
        assert "Replica 1 is lost" in page.run("document.getElementById('news').textContent")
        page.type("And now?")
        page.press("Enter", 13, "\r")
        page.wait("document.querySelectorAll('.turn.assistant .about').length == 2")
        assert not page.run("!!document.querySelector('.turn.failed')")

        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        named = [(one["role"]["value"], one["name"]["value"]) for one in nodes if one.get("role") and one.get("name")]
        assert {"button", "textbox"} <= {role for role, _ in named}
        assert not [role for role, name in named if role in FOCUSABLE and not name]
        for width in (320, 390, 800):
            page.resize(width, 800, mobile=True)
            assert page.run("document.documentElement.scrollWidth") <= width
        grounds = set()
        for scheme in ("light", "dark"):
            page.prefer(color_scheme=scheme)
            grounds.add(page.run("getComputedStyle(document.documentElement).backgroundColor"))
        assert len(grounds) == 2 and page.faults == []


def test_a_browser_gives_the_key(page: Page, tiny: Path) -> None:
    with running(tiny, {"api_keys": ("user",)}, num_pages=64) as server:
        assert server.http.get("/state/live").status_code == 401 and server.http.get("/").status_code == 200
        page.open(server.url)
        for key, wanted in (
            ("wrong", f"{shown('notice')}.includes('does not take')"),
            ("user", "state.dataset.state == 'running'"),
        ):
            page.wait("document.activeElement.id == 'key'")
            page.type(key)
            page.press("Enter", 13, "\r")
            page.wait(wanted)
        assert page.run("document.activeElement.id") == "message"
        page.type("Hello")
        page.press("Enter", 13, "\r")
        page.wait("!!document.querySelector('.turn.assistant .about')")
        assert not page.run("!!document.querySelector('.turn.failed')")
        page.open(f"{server.url}/?again")
        page.wait("document.getElementById('state').dataset.state == 'running'")
