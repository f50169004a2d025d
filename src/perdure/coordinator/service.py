"""`Service`: a coordinator on a socket. One thread, woken by packets and by the next thing that is due.

As a program (`python -m perdure.coordinator.service`) it reads what it is to be from its first line of input, says on
its output where it can be reached, and ends when its input does: with whoever started it.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Callable

import msgspec

from perdure.api.config import EngineConfig
from perdure.coordinator.coordinator import Coordinator
from perdure.coordinator.parent import end_with_input, first_line, say
from perdure.coordinator.router import Routing
from perdure.coordinator.wire import AnsweringSocket, read_secret

log = logging.getLogger("perdure")


def new_number() -> int:
    """Never used before, by anybody."""
    return secrets.randbits(63)


class Service:
    """Binds at once; `run` serves until everybody was told to stop, or `stop` is called."""

    def __init__(self, endpoint: str, routing: Routing, secret: str | None = None) -> None:
        self._socket = AnsweringSocket(endpoint, secret)
        self.endpoint = self._socket.endpoint
        self.coordinator = Coordinator(routing, new_number, time.monotonic())
        self._is_stopping = False
        self._drain_s: float | None = None
        """For how long requests may go on before the end; None = it is not near."""

    def run(self) -> None:
        coordinator, socket = self.coordinator, self._socket
        with socket:
            while not (self._is_stopping or coordinator.is_done):
                socket.wait(coordinator.due(time.monotonic()) - time.monotonic())
                now = time.monotonic()
                for address, *frames in socket.received():
                    try:
                        coordinator.take(address, frames, now)
                    except Exception:
                        log.exception("a packet could not be followed: the session it came in is ended")
                        coordinator.expel(address, now)
                if self._drain_s is not None:
                    coordinator.drain(now + self._drain_s)
                coordinator.tick(now)
                for address, packet in coordinator.packets(now):
                    if not socket.send(address, packet):
                        coordinator.cut(address, now)

    def drain(self, seconds: float) -> None:
        """From any thread, or a signal's handler: take no new request, let those that are here go on for so long, then
        tell everybody to stop. The second time: `stop`."""
        if self._drain_s is not None:
            self._is_stopping = True
        self._drain_s = seconds
        self._socket.waker.wake()

    def stop(self) -> None:
        """From any thread: end without a word. Who waits will call again, and may find another coordinator."""
        self._is_stopping = True
        self._socket.waker.wake()


def serve(endpoint: str, secret_file: str | None, config: EngineConfig, say: Callable[[str], None]) -> None:
    """A coordinator as a program of its own: until SIGTERM, or until a client stops everything. Ctrl-C ends it too.
    say: told where it can be reached. Raises `InvalidValue`."""
    service = Service(endpoint, Routing.of(config), read_secret(secret_file))
    signal.signal(signal.SIGTERM, lambda number, frame: service.stop())
    say(service.endpoint)
    service.run()


class Settings(msgspec.Struct, frozen=True):
    """What a process of its own is told on its first line of input."""

    endpoint: str
    routing: Routing
    secret: str | None = None


def main() -> None:
    settings = msgspec.json.decode(first_line(), type=Settings)
    service = Service(settings.endpoint, settings.routing, settings.secret)
    say(service.endpoint)
    end_with_input(service.stop)
    service.run()


if __name__ == "__main__":
    main()
