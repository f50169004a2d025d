"""Sockets: packets between addresses, over TCP or between processes of one machine, by ZeroMQ.

- A socket here keeps nothing: what it cannot take now is as if it had been lost on the way, and is sent again.
- Beyond this machine's own addresses a shared secret is needed. From it both sides derive the coordinator's key pair
  (CURVE): who does not know the secret does not know the public key either, which never travels, and can neither read
  nor be understood. A caller notices: its handshakes fail.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import os
import re
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from perdure.api.errors import InvalidValue

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
MOST_QUEUED = 20_000
"""Packets that may wait inside a socket for one peer."""
LINGER_MS = 500
LEAST_SECRET = 16
MOST_PORT = 65535
_IPV4_IN_IPV6 = re.compile(r"\[::ffff:([0-9.]+)\]")
"""How a socket for both kinds of addresses tells one of the older kind."""
_NUMBER = re.compile("[0-9]{1,20}")
MOST_HANDSHAKES = 3
"""Failed ones before the first that succeeds; one may fail because the other side has just gone."""


_HANDSHAKES = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


def checked_endpoint(endpoint: str, secret: str | None) -> str:
    """Raises `InvalidValue` for what is no endpoint, and for one that others could reach without a secret."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        return endpoint
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (_NUMBER.fullmatch(port) or port == "*"):
        raise InvalidValue(f"endpoint={endpoint!r} is neither tcp://HOST:PORT nor ipc://PATH")
    if port != "*" and not 1 <= int(port) <= MOST_PORT:
        raise InvalidValue(f"endpoint={endpoint!r}: port {port} is out of range: 1 to {MOST_PORT}")
    if host not in LOCAL_HOSTS and secret is None:
        raise InvalidValue(f"endpoint={endpoint!r} can be reached from other machines: give a secret (secret_file)")
    return endpoint


def read_secret(path: str | None) -> str | None:
    """The shared secret in a file. Raises `InvalidValue`."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            secret = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"secret_file={path!r} cannot be read: {error}") from None
    if len(secret) < LEAST_SECRET:
        raise InvalidValue(f"secret_file={path!r} holds {len(secret)} characters: at least {LEAST_SECRET} are needed")
    return secret


def _key_pair(secret: str, whose: str) -> tuple[bytes, bytes]:
    """Public and secret key, as both sides derive them."""
    seed = hashlib.scrypt(secret.encode(), salt=f"perdure {whose}".encode(), n=2**14, r=8, p=1, dklen=32)
    private = z85.encode(seed)
    return zmq.curve_public(private), private


class Waker:
    """Lets a thread that waits on sockets be woken by others."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)

    def fileno(self) -> int:
        return self._here.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyhow; closed: nobody waits
            self._there.send(b"\0")

    def rest(self) -> None:
        with contextlib.suppress(OSError):
            while self._here.recv(4096):
                pass

    def close(self) -> None:
        self._here.close()
        self._there.close()


class _Socket:
    """A socket with its context, its poller and its waker."""

    def __init__(self, kind: int) -> None:
        self.waker = Waker()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, MOST_QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, MOST_QUEUED)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self.waker.fileno(), zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Until something arrives, somebody wakes us, or the time is over."""
        for which, _ in self._poller.poll(max(0, math.ceil(timeout_s * 1000))):
            if which is not self._socket:
                self._is_there(which)

    def _is_there(self, which: object) -> None:
        """Something is there of what is waited for beside packets."""
        self.waker.rest()

    def received(self, most: int = 1000) -> Iterator[list[bytes]]:
        """What has arrived, but so much of it that others get their turn."""
        for _ in range(most):
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return

    def _send(self, frames: list[bytes]) -> bool:
        """False = nobody is there."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH
        return True

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self.waker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AnsweringSocket(_Socket):
    """The coordinator's. endpoint: as bound, with the port that was chosen for `*`. Raises `InvalidValue`."""

    def __init__(self, endpoint: str, secret: str | None) -> None:
        checked_endpoint(endpoint, secret)
        super().__init__(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if secret is not None:
            public, private = _key_pair(secret, "coordinator")
            self._socket.curve_publickey, self._socket.curve_secretkey = public, private
            self._socket.curve_server = True
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InvalidValue(f"endpoint={endpoint!r} cannot be bound: {error.strerror}") from None
        self.endpoint = _IPV4_IN_IPV6.sub(r"\1", self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def send(self, address: bytes, frames: list[bytes]) -> bool:
        """False = the connection that this was the address of is gone."""
        return self._send([address, *frames])


class CallingSocket(_Socket):
    """Everybody else's; it connects again by itself. refusal: why it never will. Raises `InvalidValue`."""

    def __init__(self, endpoint: str, secret: str | None) -> None:
        if checked_endpoint(endpoint, secret).endswith(":*") and endpoint.startswith("tcp:"):
            raise InvalidValue(f"endpoint={endpoint!r} names no port: give the one that the coordinator told")
        super().__init__(zmq.DEALER)
        self.refusal: str | None = None
        self._num_failed = 0
        self._has_succeeded = False
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKES)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if secret is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = _key_pair(secret, "caller")
            self._socket.curve_serverkey, _ = _key_pair(secret, "coordinator")
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InvalidValue(f"endpoint={endpoint!r} cannot be connected to: {error.strerror}") from None

    def _is_there(self, which: object) -> None:
        if which is not self._monitor:
            super()._is_there(which)
            return
        while self._monitor.poll(0):
            self._shaken(zmq.Event(recv_monitor_message(self._monitor)["event"]))

    def _shaken(self, event: zmq.Event) -> None:
        """How a handshake ended. One success is enough for ever: what fails later is a coordinator that has gone."""
        if event is zmq.Event.HANDSHAKE_SUCCEEDED:
            self._has_succeeded = True
        if self._has_succeeded:
            return
        self._num_failed += 1
        if event is zmq.Event.HANDSHAKE_FAILED_PROTOCOL or self._num_failed >= MOST_HANDSHAKES:
            self.refusal = "its secret is another: give the secret_file that it has, or none if it has none"

    def send(self, frames: list[bytes]) -> None:
        self._send(frames)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        super().close()


def new_name(kind: str) -> str:
    """A name that no other process has."""
    return f"{kind}-{socket.gethostname()}-{os.getpid()}-{base64.b32encode(os.urandom(5)).decode().lower()}"
