"""`Supervisor`: front ends as processes of their own on one port, and what they hold in common.

- All accept from one listening socket, so a connection that nobody took yet is lost with none of them.
- One that dies is started again. One that cannot even begin ends the server, which says so: at once where none has
  served in its place before, else after some such lives in a row, and then what is inside ends first. None outlives
  this process.
- Names that clients give requests are claimed here; what is asked of all front ends is passed on here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from perdure import PerdureError, StateError
from perdure.api.ending import Failure
from perdure.api.request import RequestId
from perdure.server import front_end
from perdure.server.channel import (
    Abort,
    Begin,
    Channel,
    Claim,
    Claimed,
    Drain,
    Failed,
    Look,
    Message,
    Ready,
    Release,
    TakeCheckpoint,
)
from perdure.server.peers import of_all

log = logging.getLogger("perdure")

PATIENCE_S = 10.0
"""How long a front end may take to answer what is asked of all."""
STOP_S = 2.0
"""How long they may take to end once their channel is closed; then they are killed."""
AGAIN_S = 1.0
"""How long after one that ended before it took requests the next is started."""
MOST_STILLBORN = 5
"""So many of them in a row, in a place that served before, and the server ends."""
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Where prometheus_client keeps counts that several processes share."""


class Process:
    """One front end. failure: what it could not begin for."""

    def __init__(self, listening: socket.socket, folder: str) -> None:
        self.end, theirs = socket.socketpair()
        self.is_ready = False
        self.failure: Failure | None = None
        self.channel: Channel | None = None
        with theirs:
            fds = theirs.fileno(), listening.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-m", front_end.__name__, *map(str, fds), folder],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env={**os.environ, FOLDER_VARIABLE: folder, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the process that is asked, and it tells us
            )

    def close(self) -> None:
        if self.channel is None:
            self.end.close()
        else:
            self.channel.close()


class Supervisor:
    """begin: what all are told. Must be built in a running loop."""

    def __init__(self, begin: Begin, count: int, listening: socket.socket) -> None:
        self._folder = tempfile.mkdtemp(prefix="perdure-front-ends-")
        self._begin = begin
        self._count = count
        self._listening = listening
        self._processes: dict[int, Process] = {}
        self._claims: dict[str, tuple[int, int]] = {}
        """Which front end has a name, and under which number."""
        self._num_claims = 0
        self._all_ready = asyncio.Event()
        self._draining = asyncio.Event()

    async def run(self, say: Callable[[], None]) -> None:
        """Until all have ended after a signal. say: called once all take requests. Raises what ended it otherwise."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)
        keeping = [asyncio.create_task(self._keep(index)) for index in range(self._count)]
        saying = asyncio.create_task(self._said(say))
        try:
            await asyncio.gather(*keeping)
        except PerdureError:
            if self._all_ready.is_set():  # others have requests
                self._drain()
                await asyncio.gather(*keeping, return_exceptions=True)
            raise
        finally:
            for task in (*keeping, saying):
                task.cancel()
            await asyncio.to_thread(self._end)

    async def _said(self, say: Callable[[], None]) -> None:
        await self._all_ready.wait()
        say()

    def on_signal(self) -> None:
        if self._draining.is_set():
            self._end(0.0)
            os._exit(1)
        self._drain()

    def _drain(self) -> None:
        self._draining.set()
        for one in self._processes.values():
            if one.channel is not None:
                one.channel.tell(Drain())

    def _end(self, timeout_s: float = STOP_S) -> None:
        """Leave no process and no file behind."""
        give_up_at = time.monotonic() + timeout_s
        for one in self._processes.values():
            one.close()
        for one in self._processes.values():
            try:
                one.process.wait(max(0.0, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self, index: int) -> None:
        """One front end after another, until they are meant to end. Raises what makes another useless."""
        most, num_stillborn = 1, 0
        while not self._draining.is_set():
            one = self._processes[index] = Process(self._listening, self._folder)
            code = await self._lived(index, one)
            if self._draining.is_set():
                return
            what = f"front end {index}, process {one.process.pid}, ended with code {code}"
            if one.is_ready:
                most, num_stillborn = MOST_STILLBORN, 0
                log.warning("%s: started again", what)
                continue
            num_stillborn += 1
            what = f"{what} before it took requests" if one.failure is None else f"{what}: {one.failure.message}"
            if num_stillborn == most:
                raise PerdureError(f"{what}: the server ends") if one.failure is None else one.failure.to_exception()
            log.warning("%s: started again in %g s", what, AGAIN_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), AGAIN_S)

    async def _lived(self, index: int, one: Process) -> int:
        """One front end's whole life: the code that it ended with."""

        async def answer(message: Message) -> Message | None:
            return await self._answer(index, one, message)

        one.channel = await Channel.over(one.end, answer)
        one.channel.tell(self._begin)
        await one.channel.run()
        self._claims = {name: claim for name, claim in self._claims.items() if claim[0] != index}
        return await asyncio.to_thread(one.process.wait)

    async def _answer(self, index: int, one: Process, message: Message) -> Message | None:
        match message:
            case Ready():
                one.is_ready = True
                self._listening.listen(2048)  # each front end set it to what it takes at once
                if len(self._ready()) == self._count:
                    self._all_ready.set()
                if self._draining.is_set() and one.channel is not None:
                    one.channel.tell(Drain())
            case Failed(failure):
                one.failure = failure
                one.close()
            case Claim(names):
                return self._claim(index, names)
            case Release(names, number):
                self._release(names, number)
            case Abort() | TakeCheckpoint() | Look():
                return await self._of_all(message)
            case _:
                raise AssertionError(message)
        return None

    def _ready(self) -> list[Process]:
        return [one for one in self._processes.values() if one.is_ready]

    # Names

    def _claim(self, index: int, names: list[str]) -> Claimed:
        self._num_claims += 1
        taken = [name for name in names if name in self._claims]
        free = (name for name in names if name not in self._claims)
        self._claims |= {name: (index, self._num_claims) for name in list(free)}
        return Claimed(taken, self._num_claims)

    def _release(self, names: list[str], number: int) -> None:
        for name in names:
            if name in self._claims and self._claims[name][1] == number:
                del self._claims[name]

    # What is asked of all

    async def _of_all(self, message: Abort | TakeCheckpoint | Look) -> Message:
        numbers = {name: number for name, (_, number) in self._claims.items()}
        answers = await asyncio.gather(*(_told(one, message) for one in self._ready()))
        told = of_all(message, [one for one in answers if one is not None])
        if isinstance(told, Failed):
            return told
        for name in _ended_by(message, list(numbers)):  # as at one engine: free for all that comes after this answer
            if isinstance(name, str) and name in numbers:
                self._release([name], numbers[name])
        return told


def _ended_by(message: Abort | TakeCheckpoint | Look, live: Sequence[str]) -> Sequence[RequestId]:
    """The names of requests that this ends."""
    if isinstance(message, Look):
        return []
    if isinstance(message, TakeCheckpoint):
        return [message.request_id] if message.end else []
    asked = message.request_ids
    if asked is None:
        return live
    return asked if isinstance(asked, list) else [asked]


async def _told(one: Process, message: Message) -> Message | None:
    """None: it is gone, and its requests with it."""
    assert one.channel is not None
    try:
        return await asyncio.wait_for(one.channel.ask(message), PATIENCE_S)
    except ConnectionError:
        return None
    except TimeoutError:
        late = StateError(f"a front end did not answer for {PATIENCE_S:g} s: whether it took place is not known")
        return Failed(Failure.of(late))
