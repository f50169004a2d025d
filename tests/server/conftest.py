"""Servers of the tiny model on free ports: one for most tests, others for settings of their own, all in this process
but where a test is of the process itself. Each must be left as it was found: nothing inside, every page free."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure import LLM, AsyncLLM
from perdure.server.config import ServeConfig
from perdure.server.front import Front
from perdure.server.serve import Server, bound_socket, warm_up

TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '\n' }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if thinks %}<think>{% endif %}{% endif %}"
)


class Running:
    """A server, and a client of it."""

    def __init__(self, url: str, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.server = server
        self.loop = loop
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def told(self, path: str, **body: Any) -> Any:
        """What a request that is answered gives."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error of one that is not."""
        answer = self.post(path, **body)
        assert answer.status_code == status, answer.text
        error: dict[str, Any] = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
        return error

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a stream, which must end as streams do."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200, lines
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/state").json()["stats"]
        return found

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], timeout_s: float = 20.0) -> dict[str, Any]:
        give_up_at = time.monotonic() + timeout_s
        while not holds(stats := self.stats()):
            assert time.monotonic() < give_up_at, stats
            time.sleep(0.005)
        return stats

    def check_empty(self) -> None:
        stats = self.wait_until(lambda now: now["num_running"] + now["num_waiting"] + now["num_paused"] == 0)
        assert stats["num_free_pages"] == stats["num_pages"] and stats["state"] == "running", stats


@contextmanager
def running(model: Path | str | None, serving: dict[str, Any], **settings: Any) -> Iterator[Running]:
    """On a thread of its own."""
    config = ServeConfig(**{"port": 0, "open_control": not serving.get("control_keys"), **serving})
    listening = bound_socket(config)
    listening.listen(128)
    llm = AsyncLLM(None if model is None else str(model), **settings)
    ready = threading.Event()
    found: list[Any] = []

    async def run() -> None:
        front = Front(llm, config)
        await warm_up(front)
        server = Server(front)
        found.extend([server, asyncio.get_running_loop()])
        ready.set()
        await server.serve([listening])

    thread = threading.Thread(target=asyncio.run, args=[run()], daemon=True)
    thread.start()
    try:
        while not ready.wait(0.05):
            assert thread.is_alive(), "the server died while it began"
        scheme = "http" if config.ssl_certfile is None else "https"
        server = Running(f"{scheme}://127.0.0.1:{listening.getsockname()[1]}", *found)
        yield server
        server.http.close()
    finally:
        if found:
            found[1].call_soon_threadsafe(setattr, found[0], "should_exit", True)
        thread.join(20)
        llm.shutdown()
    assert not thread.is_alive()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model gains nothing from several."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M: random weights, seed 0, vocabulary 512, 1024 tokens, with a template that knows tools."""
    from perdure.models.tiny import make_tiny_llama

    directory = make_tiny_llama(tmp_path_factory.mktemp("tiny-model"), seed=0, max_position_embeddings=1024)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TOOL_TEMPLATE}))
    return directory


@pytest.fixture(scope="session")
def direct(tiny: Path) -> Iterator[LLM]:
    """The same model driven directly."""
    with LLM(str(tiny), enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="session")
def shared_server(tiny: Path) -> Iterator[Running]:
    serving = {"served_model_name": "tiny", "reasoning_parser": "think"}
    with running(tiny, serving, num_pages=256, check_integrity=True) as server:
        yield server


@pytest.fixture(scope="session")
def short_server(tiny: Path) -> Iterator[Running]:
    """Of 256 tokens."""
    with running(tiny, {}, num_pages=64, max_model_len=256) as server:
        yield server


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    yield shared_server
    shared_server.check_empty()
