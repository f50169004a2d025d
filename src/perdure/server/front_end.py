"""One of several front ends, as a process of its own: a client of the coordinator on a listening socket that all share.

It is told what to be over a channel, whose end it is given by number, as the socket; when the channel ends, so does it,
and what lies in the folder that all share is removed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys

from perdure import AsyncLLM, PerdureError
from perdure.api.ending import Failure
from perdure.server.channel import Begin, Channel, Drain, Failed, Message, Ready
from perdure.server.front import Front
from perdure.server.peers import Connected
from perdure.server.serve import Server, show_requests

BACKLOG = 16
"""Connections that one front end takes at once: others have time for those behind."""


class FrontEnd:
    """folder: where counts of all front ends lie."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._begin: asyncio.Future[Begin] = asyncio.get_running_loop().create_future()
        self._peers: Connected | None = None
        self._front: Front | None = None
        self._server: Server | None = None
        self._is_draining = False

    async def answer(self, message: Message) -> Message | None:
        match message:
            case Begin():
                self._begin.set_result(message)
                return None
            case Drain():
                self._drain()
                return None
        assert self._peers is not None and self._front is not None
        return await self._peers.answer(message, self._front.feed, self._front.is_draining)

    def _drain(self) -> None:
        if self._server is None:
            os._exit(0)  # it has taken nothing yet
        if not self._is_draining:
            self._is_draining = True
            self._server.on_signal()

    async def run(self, end: socket.socket, listening: socket.socket) -> int:
        channel = await Channel.over(end, self.answer)
        watching = asyncio.create_task(self._watch(channel))
        begin = await self._begin
        try:
            llm = await asyncio.to_thread(
                lambda: AsyncLLM.connect(
                    begin.endpoint,
                    secret=begin.secret,
                    tokenizer=begin.tokenizer,
                    return_prompt=begin.return_prompt,
                )
            )
        except PerdureError as error:
            channel.tell(Failed(Failure.of(error)))
            await asyncio.sleep(1)  # it is ended from there
            return 1
        self._peers = Connected(llm, channel)
        front = Front(llm, begin.serving, peers=self._peers, metrics_folder=self._folder, created=begin.created)
        front.is_warm = True
        if begin.serving.log_requests:
            show_requests()
        self._front = front
        self._server = Server(front, BACKLOG, [("x-front-end", str(os.getpid()))])
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._drain)
        channel.tell(Ready())
        await self._server.serve([listening])
        watching.cancel()
        await asyncio.to_thread(llm.shutdown)
        return 0

    async def _watch(self, channel: Channel) -> None:
        await channel.run()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)  # whoever supervised is gone, and with it what computes


def main() -> int:
    """Arguments: the numbers of the channel's end and of the listening socket, and the folder."""
    logging.basicConfig(level=logging.WARNING, format="perdure: %(levelname)s: %(message)s")
    end, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])

    async def run() -> int:
        return await FrontEnd(sys.argv[3]).run(end, listening)

    return asyncio.run(run())


if __name__ == "__main__":
    code = main()
    os._exit(code)  # nothing is left to be done, and libraries take their time to unload
