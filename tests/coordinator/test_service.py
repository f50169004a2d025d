"""The coordinator on its socket: who speaks nonsense is sent away; endpoints and secrets are checked first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from perdure.api.errors import EngineDead, InvalidValue
from perdure.api.fingerprint import Fingerprint
from perdure.coordinator import messages as m
from perdure.coordinator.link import Frames
from perdure.coordinator.router import Routing
from perdure.coordinator.service import Service, new_number
from perdure.coordinator.sessions import Arrived, Caller, Lost
from perdure.coordinator.wire import CallingSocket, checked_endpoint, read_secret
from perdure.engine.remote import RemoteEngine

SECRET = "a secret of more than sixteen characters"


class Peer:
    """A caller on a socket, moved by hand; leave it by `with`."""

    def __init__(self, endpoint: str, secret: str | None = None, about: m.About | None = None) -> None:
        self.socket = CallingSocket(endpoint, secret)
        self.caller = Caller(new_number, lambda: m.Hello(m.VERSION, f"peer-{id(self)}", about), time.monotonic())
        self.heard: list[tuple[m.Message, Frames]] = []
        self.num_lost = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *what: object) -> None:
        self.socket.close()

    def turn(self, seconds: float = 0.05) -> None:
        for packet in self.caller.packets(time.monotonic()):
            self.socket.send(packet)
        self.socket.wait(seconds)
        for frames in self.socket.received():
            for happening in self.caller.take(frames, time.monotonic()):
                if isinstance(happening, Arrived):
                    self.heard.append((happening.message, happening.frames))
                self.num_lost += isinstance(happening, Lost)

    def open(self, seconds: float = 30.0) -> bool:
        give_up_at = time.monotonic() + seconds
        while self.caller.link is None and time.monotonic() < give_up_at:
            self.turn()
        return self.caller.link is not None

    def wait_for(self, kind: type) -> tuple[m.Message, Frames]:
        give_up_at = time.monotonic() + 30.0
        while time.monotonic() < give_up_at:
            if (found := next((one for one in self.heard if isinstance(one[0], kind)), None)) is not None:
                return found
            self.turn()
        raise AssertionError(f"no {kind.__name__} among {self.heard}")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(f"ipc://{tmp_path}/c", Routing("load_balanced", replica_wait_s=60.0))
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join(30)
    assert not thread.is_alive()


def about() -> m.About:
    return m.About(0, "kind", Fingerprint(), "running", 0, "model", b"details")


def test_who_says_what_nobody_can_follow_is_sent_away_and_others_are_served(service: Service) -> None:
    with Peer(service.endpoint, about=about()) as replica, Peer(service.endpoint) as client:
        _check_nonsense(service, replica, client)


def _check_nonsense(service: Service, replica: Peer, client: Peer) -> None:
    assert replica.open() and client.open()
    replica.turn(0.3)
    client.caller.send(m.Submit(0), [b"body"])
    client.wait_for(m.Welcome)
    submitted, frames = replica.wait_for(m.Submit)
    assert isinstance(submitted, m.Submit) and list(frames) == [b"body"]
    replica.caller.send(m.Parts([submitted.number], [0], [7], [0], [[1]]), [b""])  # from 7 on, and nothing came before
    give_up_at = time.monotonic() + 30
    while not replica.num_lost and time.monotonic() < give_up_at:
        replica.turn()
    assert replica.num_lost == 1 and service.coordinator.router.num_lost_replicas == 1
    assert replica.open()
    assert len(service.coordinator.router.entries) == 1, "the request waits for whoever joins next"
    client.caller.send(m.Abort([0]))
    client.wait_for(m.Ended)


def test_a_secret_is_needed_beyond_this_machine_and_must_be_the_same() -> None:
    with pytest.raises(InvalidValue, match="give a secret"):
        Service("tcp://0.0.0.0:*", Routing())
    with pytest.raises(InvalidValue, match="neither tcp://HOST:PORT nor ipc://PATH"):
        checked_endpoint("http://localhost:80", None)
    for port in ("99999", "65536", "0", "\N{SUPERSCRIPT TWO}"):
        with pytest.raises(InvalidValue, match=r"out of range: 1 to 65535|neither tcp"):
            Service(f"tcp://127.0.0.1:{port}", Routing())
        with pytest.raises(InvalidValue, match=r"out of range: 1 to 65535|neither tcp"):
            CallingSocket(f"tcp://127.0.0.1:{port}", None)
    with pytest.raises(InvalidValue, match="names no port"):
        CallingSocket("tcp://127.0.0.1:*", None)
    service = Service("tcp://127.0.0.1:*", Routing(), SECRET)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        for secret, is_understood in ((SECRET, True), (SECRET + "!", False), (None, False)):
            with Peer(service.endpoint, secret) as peer:
                assert peer.open(30.0 if is_understood else 1.0) == is_understood
    finally:
        service.stop()
        thread.join(30)


def test_a_secret_file_is_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    assert read_secret(None) is None
    with pytest.raises(InvalidValue, match="cannot be read"):
        read_secret(str(file))
    file.write_text("short")
    with pytest.raises(InvalidValue, match="holds 5 characters: at least 16"):
        read_secret(str(file))
    file.write_text(f"{SECRET}\n")
    assert read_secret(str(file)) == SECRET


def test_a_client_says_whether_a_coordinator_answered(service: Service, tmp_path: Path) -> None:
    with pytest.raises(EngineDead, match=r"after 0\.2 s no coordinator has answered"):
        RemoteEngine(f"ipc://{tmp_path}/nowhere", patience_s=0.2)
    with pytest.raises(EngineDead, match="0 of 1 replicas serve, says the coordinator"):
        RemoteEngine(service.endpoint, patience_s=3.0)


def test_an_endpoint_that_is_taken_is_said_so(service: Service) -> None:
    taken = Service("tcp://127.0.0.1:*", Routing())
    try:
        with pytest.raises(InvalidValue, match="cannot be bound"):
            Service(taken.endpoint, Routing())
    finally:
        taken._socket.close()
