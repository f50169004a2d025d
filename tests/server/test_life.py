"""Requests that are aborted, left, refused or overtaken by the server's end, over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from perdure import LLM, InvalidValue, SamplingParams
from perdure.server.config import ServeConfig
from perdure.server.serve import bound_socket
from perdure.server.stream import EventStream, event
from tests.server.conftest import Running, running
from tests.server.started import ENDLESS, PATH, ends, in_flight, process
from tests.witness import witness


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_pieces_of_an_answer_leave_at_once(host: str) -> None:
    """The system holds none back until the client has confirmed the piece before, which may take it 40 ms."""
    at_once: list[int] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    try:
        listening = bound_socket(ServeConfig(host=host, port=0))
    except InvalidValue as error:
        pytest.skip(str(error))  # no IPv6 here

    async def main() -> None:
        async with await asyncio.start_server(connected, sock=listening):
            reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
            await reader.read()
            writer.close()

    asyncio.run(main())
    assert at_once and all(at_once)


def test_t02_an_id_is_free_straight_after_its_abort(server: Running, direct: LLM) -> None:
    """200 times: a stream that would not end is aborted after some events, and its id is used again at once."""
    draw = random.Random(2)
    short: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    [result] = direct.generate([[256, 9, 9]], SamplingParams(**short))
    expected, num_events = result.outputs[0].token_ids, 0

    async def first(client: httpx.AsyncClient, begun: asyncio.Event, wanted: int) -> list[dict[str, Any]]:
        body = {**ENDLESS, "prompt": [256, 7], "request_id": "x", "stream": True}
        found = []
        async with client.stream("POST", PATH, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line.removeprefix("data: "))["choices"]
                    if len(found) >= wanted:
                        begun.set()
        return found

    async def both(client: httpx.AsyncClient) -> int:
        begun = asyncio.Event()
        reading = asyncio.create_task(first(client, begun, draw.randrange(1, 8)))
        reading.add_done_callback(lambda _: begun.set())
        await begun.wait()
        assert (await client.post("/abort", json={"request_ids": ["x"]})).status_code == 200
        again = {**short, "prompt": [256, 9, 9], "request_id": "x", "return_token_ids": True}
        second = (await client.post(PATH, json=again)).json()["choices"][0]
        ended = await reading
        assert ended[-1]["finish_reason"] == "abort" and sum(len(part["token_ids"]) for part in ended) > 0
        assert second["finish_reason"] == "length" and second["token_ids"] == expected
        return len(ended)

    async def all_of_them() -> int:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return sum([await both(client) for _ in range(200)])

    num_events = asyncio.run(all_of_them())
    witness("T02-http", times=200, events=num_events)


def test_t05_a_request_that_waits_for_pages_is_aborted_with_what_it_has(tiny: Path, direct: LLM) -> None:
    settings: dict[str, Any] = {
        "num_pages": 8,
        "paused_pages": 8,
        "enable_prefix_caching": False,
        "check_integrity": True,
    }
    with running(tiny, {}, **settings) as server, ThreadPoolExecutor(2) as pool:
        shape: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "logprobs": 0, "seed": 3}
        alone = {
            name: direct.generate([[256, first]], SamplingParams(**shape))[0].outputs[0]
            for name, first in (("a", 5), ("b", 6))
        }
        body = {**shape, "return_token_ids": True}
        waits = 0
        for _ in range(20):  # until one is still there when its abort comes
            calls = {
                name: pool.submit(server.told, PATH, prompt=[256, first], request_id=name, **body)
                for name, first in (("a", 5), ("b", 6))
            }
            stats = server.wait_until(lambda now, before=waits: now["num_pauses"] + now["num_evictions"] > before)
            name = stats["paused_ids"][0] if stats["paused_ids"] else "b"
            server.post("/abort", request_ids=name)
            choices = {key: call.result()["choices"][0] for key, call in calls.items()}
            for key, choice in choices.items():
                kept = len(choice["token_ids"])
                assert (
                    kept == (kept if choice["finish_reason"] == "abort" else 100) == len(choice["logprobs"]["tokens"])
                )
                assert choice["token_ids"] == alone[key].token_ids[:kept]
                assert choice["logprobs"]["token_logprobs"] == (alone[key].selected_logprobs or [])[:kept]
            server.check_empty()
            if choices[name]["finish_reason"] == "abort":
                break
            now = server.stats()
            waits = now["num_pauses"] + now["num_evictions"]
        assert choices.pop(name)["finish_reason"] == "abort" and kept
        assert [other["finish_reason"] for other in choices.values()] == ["length"]
        witness("T05-http", waited=stats["num_pauses"] + stats["num_evictions"])


def test_t07_harmless_aborts(server: Running, direct: LLM) -> None:
    shape: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "seed": 7}
    [expected] = direct.generate([[256, 7]], SamplingParams(**shape))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.told, PATH, prompt=[256, 7], request_id="abc", return_token_ids=True, **shape)
        server.wait_until(lambda stats: stats["num_running"] > 0)
        server.told(PATH, prompt="a", request_id="done", max_tokens=1)
        for names in ("", "unknown", "done", ["ab", "ab"], [], 7):
            assert server.post("/abort", request_ids=names).status_code == 200
        choice = running.result()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["token_ids"] == expected.outputs[0].token_ids
    witness("T07-http", tokens=300)


def test_a_live_id_is_refused(server: Running) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.told, PATH, prompt=[256, 7], request_id="twice", **ENDLESS)
        server.wait_until(lambda stats: stats["num_running"] > 0)
        assert "twice" in server.refused(PATH, prompt="a", request_id="twice", max_tokens=1)["message"]
        server.post("/abort", request_ids=["twice"])
        assert running.result()["choices"][0]["finish_reason"] == "abort"


def test_t67_a_client_that_goes_aborts_its_requests(server: Running) -> None:
    """20 streams and 5 whole answers, left at random moments."""
    draw = random.Random(67)

    async def leave(number: int) -> int:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {**ENDLESS, "prompt": [256, number], "n": 1 + number % 2}
            if number >= 20:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(PATH, json=body, timeout=0.2 + draw.random() * 0.2)
                return 0
            received, wanted = 0, draw.randrange(1, 12)
            async with client.stream("POST", PATH, json={**body, "stream": True}) as answer:
                async for _ in answer.aiter_lines():
                    received += 1
                    if received >= wanted:
                        break
            return received

    async def all_leave() -> list[int]:
        return await asyncio.gather(*(leave(number) for number in range(25)))

    received = asyncio.run(all_leave())
    left_at = time.monotonic()
    server.check_empty()
    seconds = time.monotonic() - left_at
    assert server.http.get("/health").status_code == 200
    witness("T67", events=sum(received), aborted_after_ms=max(1, round(seconds * 1000)))


def test_an_idle_connection_is_closed_by_its_client(server: Running) -> None:
    """Else a request that is sent just then is lost: clients keep one for 5 s, proxies for up to a minute."""
    assert server.server.config.timeout_keep_alive > 60
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(3):
            told = client.get("/health")
            assert told.status_code == 200 and "connection" not in told.headers


def test_a_full_queue_is_429(tiny: Path) -> None:
    with running(tiny, {}, num_pages=256, max_num_seqs=1, max_num_waiting=1) as server, ThreadPoolExecutor(2) as pool:
        calls = []
        for inside in ((1, 0), (1, 1)):  # one after the other: two that arrive at once are two that wait
            calls.append(pool.submit(server.told, PATH, prompt=[256, 7], **ENDLESS))
            server.wait_until(lambda now, inside=inside: (now["num_running"], now["num_waiting"]) == inside)
        for stream in (False, True):
            answer = server.post(PATH, prompt="a", stream=stream)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
        server.post("/abort")
        assert {call.result()["choices"][0]["finish_reason"] for call in calls} == {"abort"}
        server.check_empty()


def test_keys_origins_and_sizes(tiny: Path) -> None:
    serving = {
        "api_keys": ("user", "other"),
        "control_keys": ("boss",),
        "allowed_origins": ("https://page.example",),
        "max_body_bytes": 1000,
    }
    with running(tiny, serving, num_pages=64) as server:
        http = server.http
        body = {"prompt": "a", "max_tokens": 1}
        for key, path, status in (
            (None, PATH, 401),
            ("wrong", PATH, 401),
            ("user", PATH, 200),
            ("other", PATH, 200),
            ("boss", PATH, 200),
            ("user", "/pause", 401),
            (None, "/pause", 401),
            ("boss", "/reset_prefix_cache", 200),
        ):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = http.post(path, json=body if path == PATH else None, headers=headers)
            assert answer.status_code == status, (key, path, answer.text)
        assert [http.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]
        assert http.get("/v1/models").status_code == 401
        user = {"Authorization": "Bearer user"}
        for content in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):
            answer = http.post(PATH, content=content, headers=user)
            assert answer.status_code == 413 and "max_body_bytes=1000" in answer.text
        asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        assert http.options(PATH, headers=asks).headers["access-control-allow-origin"] == "https://page.example"
        asks["Origin"] = "https://other.example"
        assert "access-control-allow-origin" not in http.options(PATH, headers=asks).headers


def test_control_is_closed_without_a_key(tiny: Path) -> None:
    with running(tiny, {"open_control": False}, num_pages=64) as server:
        assert server.refused("/pause", 403)["code"] == "control_closed"
        assert server.told(PATH, prompt="a", max_tokens=1)


def test_t68_sigterm_without_time_ends_requests_with_what_they_have(tiny: Path) -> None:
    begun = time.monotonic()
    with process(tiny, "--drain-timeout", "0") as (server, client):
        started_in = time.monotonic() - begun
        found = in_flight(client, 3)
        server.send_signal(signal.SIGTERM)
        told_at = time.monotonic()
        assert ends(found) == ["abort"] * 3
        assert server.wait(60) == 0
        assert time.monotonic() - told_at < max(
            5.0, started_in
        )  # a machine too busy to start one in time is no witness
        witness("T68-0", tokens=sum(len(events) for events in found))


def test_t68_sigterm_with_time_lets_them_finish_and_a_second_ends_at_once(tiny: Path) -> None:
    with process(tiny, "--drain-timeout", "30") as (server, client):
        found = in_flight(client, 3)
        server.send_signal(signal.SIGTERM)
        while (ready := client.get("/ready")).status_code == 200:
            time.sleep(0.005)
        assert ready.status_code == 503 and ready.json()["state"] == "draining"
        assert client.get("/health").status_code == 200
        refused = client.post(PATH, json={"prompt": "a"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        alive = server.poll() is None and any(events[-1]["finish_reason"] is None for events in found)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 1 and alive
        witness("T68-second", tokens=sum(len(events) for events in found))


def test_t68_requests_inside_finish_while_new_ones_are_refused(tiny: Path) -> None:
    """The signal's handler itself, in this process."""
    with running(tiny, {"drain_timeout_s": 30.0}, num_pages=256) as server:
        found = in_flight(server.http, 3, max_tokens=300)
        server.loop.call_soon_threadsafe(server.server.on_signal)
        assert ends(found) == ["length"] * 3
        assert [sum(len(part["token_ids"]) for part in events) for events in found] == [300] * 3
        witness("T68-30", tokens=900)


def test_a_stream_whose_reader_went_is_written_to_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """Many events are ready at once, and the connection breaks at the first of them: asyncio has nothing to complain
    of."""
    is_gone, told = threading.Event(), list[int]()

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 0\n\n"
        is_gone.wait(20)  # as a loop that is busy with others
        for at in range(1, 100):
            told.append(at)
            yield b"data: %d\n\n" % at

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(events(), lambda: None, {})(scope, receive, send)

    async def main() -> None:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(server.serve([listening]))
            await asyncio.to_thread(leave, listening.getsockname()[1])
            while not told or asyncio.all_tasks() - {asyncio.current_task(), serving}:
                await asyncio.sleep(0.01)
            server.should_exit = True
            await serving

    def leave(port: int) -> None:
        """Reset the connection after its first event."""
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while b"data: 0" not in client.recv(4096):
                pass
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        is_gone.set()

    asyncio.run(main())
    assert len(told) < 50 and "socket.send() raised exception" not in caplog.text


def test_an_event_is_one_line_for_every_client() -> None:
    """Some split where Unicode ends a line."""

    class Said(msgspec.Struct):
        text: str

    said = Said("one\u2028two\u0085three\u2029four\n\r\x0b\x0c\x1c\x1d\x1e\u00e9")
    (line, empty) = event(said).decode().splitlines()
    assert not empty and msgspec.json.decode(line.removeprefix("data: "), type=Said) == said
