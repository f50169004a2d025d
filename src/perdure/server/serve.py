"""`serve`: an engine and its HTTP front end, or several (`supervisor`), from start until a signal ends them.

- The first SIGTERM or SIGINT drains: `/ready` is 503 and new requests are refused at once, those inside go on for
  `drain_timeout_s`, then they end with what they have and are answered. A second one ends everything at once.
- Handlers of signals are installed here and nowhere else: whoever embeds `make_app` keeps his own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

import msgspec
import uvicorn
from msgspec.structs import replace

from perdure import AsyncLLM, EngineConfig, InvalidValue, PerdureError, SamplingParams
from perdure.server.app import make_app, requests_log
from perdure.server.config import ServeConfig
from perdure.server.front import Front

log = logging.getLogger("perdure")

KEEP_ALIVE_S = 90
"""How long an idle connection stays open: longer than with the usual clients (5 s) and proxies (60 s). Whoever closes
first should be the one who sends, else a request meets a connection that is just being closed, and is lost."""
ANSWERS_S = 3.0
"""How long aborted requests may take to be answered."""


def serve(config: EngineConfig, serving: ServeConfig, say: Callable[[str], None] = print) -> None:
    """Serve until a signal. say: is told where, once it is ready. Raises what the engine's start raises."""
    listening = bound_socket(serving)
    if serving.num_front_ends > 1:
        config = replace(config, own_process=True)
    try:
        llm = start(config, serving)
    except BaseException:
        listening.close()
        raise
    try:
        asyncio.run(_serve(llm, config, serving, listening, say))
    finally:
        llm.shutdown()


def start(config: EngineConfig, serving: ServeConfig) -> AsyncLLM:
    """What is behind the server: an engine of this configuration, or the replicas of a coordinator."""
    if serving.connect is not None:
        return AsyncLLM.connect(serving.connect, tokenizer=config.tokenizer, secret_file=serving.secret_file)
    return AsyncLLM(**{name: getattr(config, name) for name in config.__struct_fields__})


def bound_socket(serving: ServeConfig) -> socket.socket:
    """The port is taken before the model is loaded: who cannot have it hears of it at once."""
    family = socket.AF_INET6 if ":" in serving.host else socket.AF_INET
    # Only a socket that says it is TCP's is made to send at once by asyncio; another waits for the client's word first.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((serving.host, serving.port))
    except OSError as error:
        listening.close()
        raise InvalidValue(f"host={serving.host!r} port={serving.port}: {error.strerror or error}") from None
    return listening


async def _serve(
    llm: AsyncLLM, config: EngineConfig, serving: ServeConfig, listening: socket.socket, say: Callable[[str], None]
) -> None:
    front = Front(llm, serving)
    await warm_up(front)

    def say_all() -> None:
        say(_where(front, listening))
        say(resolved(front))

    if serving.num_front_ends > 1:
        await _supervise(front, config, listening, say_all)
        return
    if serving.log_requests:
        show_requests()
    server = Server(front)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.on_signal)
    listening.listen(2048)
    say_all()
    await server.serve([listening])


async def _supervise(front: Front, config: EngineConfig, listening: socket.socket, say: Callable[[], None]) -> None:
    from perdure.server.channel import Begin
    from perdure.server.supervisor import Supervisor

    assert front.llm.coordinator is not None
    endpoint, secret = front.llm.coordinator

    begin = Begin(endpoint, secret, config.tokenizer, config.return_prompt, front.created, front.config)
    await Supervisor(begin, front.config.num_front_ends, listening).run(say)


def _where(front: Front, listening: socket.socket) -> str:
    serving = front.config
    scheme = "http" if serving.ssl_certfile is None else "https"
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    return f"serving {front.model} at {scheme}://{host}:{listening.getsockname()[1]}"


def resolved(front: Front) -> str:
    """The configuration that is in force, as a line of JSON. Of keys it tells their number."""
    server = msgspec.to_builtins(front.config)
    for name in ("api_keys", "control_keys"):
        server[name] = len(server[name])
    told = {"configuration": {"engine": front.llm.describe(), "server": {**server, "model": front.model}}}
    return msgspec.json.encode(told, enc_hook=str).decode()


async def warm_up(front: Front) -> None:
    """One token, and then as after start: what comes first must not depend on this. Replicas that served others before
    are left as they are."""
    if front.config.connect is not None:
        front.is_warm = True
        return
    await front.llm.generate([0], SamplingParams(max_tokens=1, detokenize=False))
    await front.llm.reset()
    front.is_warm = True


class Server(uvicorn.Server):
    """uvicorn's, ended by us. backlog: connections that are taken at once. headers: of every answer."""

    def __init__(self, front: Front, backlog: int = 2048, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(front),
                log_config=None,
                backlog=backlog,
                headers=list(headers),
                access_log=False,
                lifespan="off",
                server_header=False,
                ssl_certfile=front.config.ssl_certfile,
                ssl_keyfile=front.config.ssl_keyfile,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self.front = front
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve(sockets)
        if self.front.tracing is not None:
            await asyncio.to_thread(self.front.tracing.close)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: `on_signal` is called."""
        yield

    def on_signal(self) -> None:
        if self._draining is not None:
            os._exit(1)
        self.front.is_draining = True
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        front = self.front
        try:
            async with asyncio.timeout(front.config.drain_timeout_s):
                await front.drained()
        except TimeoutError:
            with contextlib.suppress(PerdureError):
                await front.llm.abort()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(front.drained(), ANSWERS_S)
        self.should_exit = True


def show_requests() -> None:
    requests_log.setLevel(logging.INFO)
    requests_log.propagate = False
    requests_log.addHandler(logging.StreamHandler(sys.stderr))
