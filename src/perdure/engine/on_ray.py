"""Replicas over a Ray cluster: placed, placed again when lost, and let go in the end.

- A replica is an actor, and Ray chooses its node. It calls the coordinator like any other: no request goes through Ray.
- One whose process or node is gone is placed anew wherever there is room; its requests go on at others meanwhile.
- Actors belong to the process that placed them: they end with it, however it ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from perdure.api.config import EngineConfig
from perdure.api.errors import InvalidValue, PerdureError, described
from perdure.api.event import Failure
from perdure.coordinator import service
from perdure.coordinator.router import Routing
from perdure.coordinator.wire import LOCAL_HOSTS, read_secret
from perdure.engine.launch import LEAST_LIFE_S, STOP_S, Child, Children, of_replica
from perdure.engine.replica import Replica, Settings
from perdure.engine.share import with_package

log = logging.getLogger("perdure")

LOOK_S = 1.0
"""How long the watcher waits before it looks whether it shall end."""


class ReplicaActor:
    """A replica as an actor. `serve` takes as long as it lives; the others are called meanwhile."""

    def __init__(self, settings: bytes) -> None:
        self._settings = settings
        self._replica: Replica | None = None
        self._is_leaving = False

    def serve(self) -> bytes | None:
        """Until it is told to go. Returns what kept it from beginning, a `Failure`."""
        import torch

        settings = msgspec.json.decode(self._settings, type=Settings)
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        try:
            self._replica = Replica(settings.config, settings.endpoint, settings.secret)
        except PerdureError as error:
            return msgspec.json.encode(Failure.of(error))
        if self._is_leaving:
            self._replica.leave()
        self._replica.run()
        return None

    def leave(self) -> None:
        """Let what is here go on elsewhere."""
        self._is_leaving = True
        if self._replica is not None:
            self._replica.leave()

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


class _Placed(NamedTuple):
    """serving: Ray's reference to what `serve` will return."""

    actor: Any
    serving: Any
    began_at: float


class RayReplicas:
    """`data_parallel_size` actors, watched by a thread. gave_up(error): called once if one cannot begin, as its
    settings are wrong. Raises `InvalidValue` where there is no Ray, no cluster, or no node that could hold one."""

    def __init__(
        self, config: EngineConfig, endpoint: str, secret: str | None, gave_up: Callable[[PerdureError], None]
    ) -> None:
        self._ray = _ray()
        self._connects = not self._ray.is_initialized()
        if self._connects:
            self._connect(config.ray_address)
        self._gave_up = gave_up
        self._ending = threading.Event()
        try:
            endpoint = self._reachable(endpoint)
            self._check_room(config)
            self._settings = [
                msgspec.json.encode(Settings(of_replica(config, index), endpoint, secret, config.replica_cpus))
                for index in range(config.data_parallel_size)
            ]
            self._make = self._ray.remote(ReplicaActor).options(
                num_cpus=config.replica_cpus,
                num_gpus=config.replica_gpus,
                max_concurrency=4,  # it is asked to leave while it serves
                max_restarts=0,  # one that is lost may have been lost with its node: it is placed anew
                scheduling_strategy="SPREAD",
            )
            self._placed = {index: self._place(index) for index in range(config.data_parallel_size)}
        except BaseException:
            self._disconnect()
            raise
        self._watcher = threading.Thread(target=self._watch, name="perdure-ray", daemon=True)
        self._watcher.start()

    def _connect(self, address: str) -> None:
        """A handler that Ray installs for SIGTERM is taken back: signals are the program's."""
        before = signal.getsignal(signal.SIGTERM)
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InvalidValue(f"ray: no cluster at address={address!r}: {described(error)}") from None

    def _disconnect(self) -> None:
        if self._connects:
            self._ray.shutdown()

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _reachable(self, endpoint: str) -> str:
        """As the nodes can call it."""
        here = self._ray.util.get_node_ip_address()
        scheme, _, rest = endpoint.partition("://")
        host, _, port = rest.rpartition(":")
        if scheme == "tcp" and host in ("0.0.0.0", "[::]"):
            return f"tcp://{here}:{port}"
        elsewhere = [node["NodeManagerAddress"] for node in self._nodes() if node["NodeManagerAddress"] != here]
        if elsewhere and (scheme == "ipc" or host in LOCAL_HOSTS):
            raise InvalidValue(f"endpoint={endpoint!r} cannot be reached from the cluster's node at {elsewhere[0]}")
        return endpoint

    def _check_room(self, config: EngineConfig) -> None:
        """A cluster may grow; a node with too little never will, but another may come: so it is only said."""
        wanted = config.data_parallel_size
        held = sum(
            int(min(_fits(node, "CPU", config.replica_cpus), _fits(node, "GPU", config.replica_gpus)))
            for node in self._nodes()
        )
        if held < wanted:
            log.warning("the cluster has room for %d of %d replicas now: the others wait", held, wanted)

    def _place(self, index: int) -> _Placed:
        actor = self._make.remote(self._settings[index])
        return _Placed(actor, actor.serve.remote(), time.monotonic())

    @property
    def nodes(self) -> dict[int, str]:
        """On which node each is, once it is placed."""
        asked = {index: one.actor.node.remote() for index, one in self._placed.items()}
        return {index: self._ray.get(reference) for index, reference in asked.items()}

    # The watcher's thread

    def _watch(self) -> None:
        while not self._ending.is_set():
            placed = {one.serving: index for index, one in self._placed.items()}
            ended, _ = self._ray.wait(list(placed), timeout=LOOK_S)
            for serving in ended:
                if self._ending.is_set():
                    return
                self._ended(placed[serving], serving)

    def _ended(self, index: int, serving: Any) -> None:
        """A replica is no more, and nobody asked for that."""
        try:
            failure = self._ray.get(serving)
        except Exception as error:  # its process or node is gone, or its engine died
            log.warning("replica %d is lost, and placed anew: %s", index, described(error).partition("\n")[0])
        else:
            if failure is not None:
                self._gave_up(msgspec.json.decode(failure, type=Failure).to_exception())
                self.expect_end()
                return
            log.warning("replica %d has left, and is placed anew", index)
        lived_s = time.monotonic() - self._placed[index].began_at
        if not self._ending.wait(max(0.0, LEAST_LIFE_S - lived_s)):
            self._placed[index] = self._place(index)

    # The end

    def expect_end(self) -> None:
        """Those that go from now on are not placed anew."""
        self._ending.set()

    def end(self, timeout_s: float = STOP_S) -> None:
        """Every replica goes; by force what takes too long. Harmless when done twice."""
        self.expect_end()
        self._watcher.join()
        if not self._placed:
            return
        for one in self._placed.values():
            one.actor.leave.remote()
        serving = [one.serving for one in self._placed.values()]
        self._ray.wait(serving, num_returns=len(serving), timeout=max(0.0, timeout_s))
        for one in self._placed.values():
            self._ray.kill(one.actor)
        self._placed.clear()
        self._disconnect()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InvalidValue("launcher='ray' needs Ray: pip install 'perdure[ray]'") from None
    return ray


def _fits(node: dict[str, Any], resource: str, wanted: float) -> float:
    """How many of such a need this node can hold."""
    return float(node["Resources"].get(resource, 0.0)) // wanted if wanted else float("inf")


class RayFleet(Children):
    """A fleet over a cluster: the coordinator is a process of this machine, which the cluster's nodes can call at some
    port, with a secret made for it. Raises `InvalidValue`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.secret: str | None = secrets.token_urlsafe(32)
        self.hopeless: Future[PerdureError] = Future()
        settings = service.Settings("tcp://0.0.0.0:*", Routing.of(config), self.secret)
        coordinator = Child(service.__name__, settings, with_package(os.environ))
        self.children.append(coordinator)
        try:
            bound = coordinator.ready().decode()
            coordinator.become(replace(settings, endpoint=bound))
            self._replicas = RayReplicas(config, bound, self.secret, self.hopeless.set_result)
        except BaseException:
            super().end()
            raise
        self.watch()
        self.endpoint = f"tcp://127.0.0.1:{bound.rpartition(':')[2]}"

    @property
    def nodes(self) -> dict[int, str]:
        return self._replicas.nodes

    def leave(self) -> None:
        self._replicas.expect_end()
        super().leave()

    def end(self, timeout_s: float = STOP_S) -> None:
        give_up_at = time.monotonic() + timeout_s
        self._replicas.end(timeout_s)
        super().end(give_up_at - time.monotonic())


def serve_on_ray(
    endpoint: str, secret_file: str | None, config: EngineConfig, drain_s: float, say: Callable[[str], None]
) -> None:
    """A coordinator as a program of its own, with its replicas on a cluster. SIGTERM: no new request is taken, those
    that are here have `drain_s` seconds, then all end; a second one ends at once. Raises what keeps replicas from
    beginning."""
    secret = read_secret(secret_file)
    served = service.Service(endpoint, Routing.of(config), secret)
    errors: list[PerdureError] = []

    def give_up(error: PerdureError) -> None:
        errors.append(error)
        served.stop()

    replicas = RayReplicas(config, served.endpoint, secret, give_up)

    def drain(number: int, frame: object) -> None:
        replicas.expect_end()
        served.drain(drain_s)

    signal.signal(signal.SIGTERM, drain)
    say(served.endpoint)
    try:
        served.run()
    finally:
        replicas.end()
    for error in errors:
        raise error
