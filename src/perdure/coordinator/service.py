"""`Service`: a coordinator on a socket. One thread, woken by packets and by the next thing that is due.

As a program (`python -m perdure.coordinator.service`) it reads what it is to be from its first line of input, says on
its output where it can be reached, and ends when its input does: with whoever started it.
"""

from __future__ import annotations

import secrets
import time

import msgspec

from perdure.coordinator.coordinator import Coordinator
from perdure.coordinator.parent import end_with_input, first_line
from perdure.coordinator.router import Routing
from perdure.coordinator.wire import AnsweringSocket


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

    def run(self) -> None:
        coordinator, socket = self.coordinator, self._socket
        with socket:
            while not (self._is_stopping or coordinator.is_done):
                socket.wait(coordinator.due(time.monotonic()) - time.monotonic())
                now = time.monotonic()
                for address, *frames in socket.received():
                    coordinator.take(address, frames, now)
                coordinator.tick(now)
                for address, packet in coordinator.packets(now):
                    socket.send(address, packet)

    def stop(self) -> None:
        """From any thread: end without a word. Who waits will call again, and may find another coordinator."""
        self._is_stopping = True
        self._socket.waker.wake()


class Settings(msgspec.Struct, frozen=True):
    """What a process of its own is told on its first line of input."""

    endpoint: str
    routing: Routing
    secret: str | None = None


def main() -> None:
    settings = msgspec.json.decode(first_line(), type=Settings)
    service = Service(settings.endpoint, settings.routing, settings.secret)
    print(service.endpoint, flush=True)
    end_with_input(service.stop)
    service.run()


if __name__ == "__main__":
    main()
