"""What a simulated fleet is made of: the wire, replicas and clients. Everything random and the clock are the fleet's.

Each peer says when it has something to do next, so that a moment in which nothing happens costs nothing.
"""

from __future__ import annotations

import heapq
import itertools
import random
from typing import TYPE_CHECKING

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint
from perdure.api.config import CoreConfig
from perdure.api.request import Request
from perdure.api.scores import TokenScores
from perdure.coordinator import messages as m
from perdure.coordinator.client import Submissions, Told
from perdure.coordinator.sessions import Arrived, Caller, Opened
from perdure.core.prefix_report import PrefixReport
from perdure.core.scheduler import Scheduler
from perdure.engine.bridge import Bridge, Condition
from perdure.engine.holdings import Holdings
from perdure.engine.loop import Inbox, Loop
from perdure.runner.fake import FakeDevice
from tests.sim.life import PieceCursor

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet

NUM_REPLICAS = 4
PIECE = 4
"""Bytes of weights that travel at once."""
CHECKED = 0.1
"""Part of the replicas that account for everything after every turn; `tests.sim.life` does so always."""
MOST_DELAY_S = 1.0


class Wire:
    """Loses, repeats, delays and so reorders."""

    def __init__(self, rng: random.Random, lossy: float) -> None:
        self.rng = rng
        self.lossy = lossy
        self.now = 0.0
        self._flying: list[tuple[float, int, str, str, list[bytes]]] = []
        self._count = itertools.count()

    def send(self, source: str, target: str, frames: list[bytes]) -> None:
        roll = self.rng.random()
        copies = 0 if roll < self.lossy else 2 if roll < 1.5 * self.lossy else 1
        for _ in range(copies):
            slow = self.rng.random() < self.lossy
            delay = self.rng.random() * (MOST_DELAY_S if slow else 0.02)
            heapq.heappush(self._flying, (self.now + delay, next(self._count), source, target, list(frames)))

    def arrived(self) -> list[tuple[str, str, list[bytes]]]:
        found = []
        while self._flying and self._flying[0][0] <= self.now:
            _, _, source, target, frames = heapq.heappop(self._flying)
            found.append((source, target, frames))
        return found


class Peer:
    """Whoever calls the coordinator. address: of its present connection. wake_at: when it has something to do next."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self.address = ""
        self.wake_at = 0.0
        self.is_hung = False
        self.caller = Caller(fleet.number, self.hello, fleet.wire.now)
        self.connect()

    def hello(self) -> m.Hello | None:
        return m.Hello(m.VERSION, self.name)

    def connect(self) -> None:
        """By another connection; the one before leads nowhere."""
        self.fleet.peers.pop(self.address, None)
        self.address = f"{self.name} {next(self.fleet.connections)}"
        self.fleet.peers[self.address] = self

    def take(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def _send_packets(self) -> None:
        now = self.fleet.wire.now
        for packet in self.caller.packets(now):
            self.fleet.wire.send(self.address, "coordinator", packet)
        self.wake_at = self.caller.due(now)


class SimReplica(Peer):
    """One incarnation of a replica: gone with all it holds when it dies."""

    def __init__(self, fleet: Fleet, index: int, config: CoreConfig) -> None:
        self.index = index
        self.config = config
        self.held = False
        self.speed = fleet.rng.choice((0.2, 0.5, 1.0))
        self.source = "0"
        self.device = FakeDevice(config.num_pages, config.page_size, config.max_num_seqs, config.vocab_size)
        self.scheduler = Scheduler(config, lambda request: PieceCursor())
        self.inbox = Inbox()
        depth, check = fleet.rng.randint(1, 4), fleet.rng.random() < CHECKED
        self.loop = Loop(self.scheduler, self.device, self.inbox, self._publish, steps_in_flight=depth, check=check)
        self.scheduler.requests.cache.index.report = report = PrefixReport()
        self.holdings = Holdings(report.changes)
        self.tickets = itertools.count(1)
        self.bridge = Bridge(self)
        self.prepared: dict[int, str | None] = {}
        self.given: set[str] = set()
        """Weights that came as tensors, and are here."""
        self.taking: dict[int, tuple[str, bytes]] = {}
        super().__init__(fleet, f"replica-{index}-{next(fleet.connections)}")

    def hello(self) -> m.Hello | None:
        if not self.bridge.is_settled:
            return None
        state, epoch, fingerprint = self.condition()
        about = m.About(self.index, "sim", fingerprint, state, epoch, self.source, b"")
        return m.Hello(m.VERSION, self.name, about)

    def condition(self) -> Condition:
        stats = self.scheduler.stats()
        return Condition(stats.state, stats.weight_epoch, self.scheduler.requests.fingerprint)  # type: ignore[arg-type]

    # The host of the bridge

    def ticket(self) -> int:
        return next(self.tickets)

    def send(self, command: cmd.Command) -> None:
        if isinstance(command, cmd.Submit) and command.checkpoint is not None and command.checkpoint.num_output:
            self.fleet.marks["went on in mid-stream"] += command.checkpoint.status == "running"
        self.inbox.put(command)

    def prepare(self, ask: int, order: m.Asked, source: str | None) -> None:
        failure = None
        if source is not None and source.startswith(m.OF_TENSORS) and source not in self.given:
            self.taking[ask] = source, b""
            self.bridge.fetch(ask, source, 0)
            return
        if isinstance(order, cmd.UpdateWeights) and order.has_weights and source == "missing":
            failure = ev.Failure("ModelNotFound", "no such weights")
        else:
            self.prepared[ask] = source
        self.bridge.prepared(ask, failure)

    def apply(self, ask: int, order: m.Asked) -> None:
        source = self.prepared.pop(ask)
        if isinstance(order, cmd.UpdateWeights) and order.has_weights:
            assert source is not None
            self.device.staged[order.ticket] = number_of(source)
            self.source = source
        self.inbox.put(order)

    def forget(self, ask: int) -> None:
        self.prepared.pop(ask, None)
        self.taking.pop(ask, None)

    def take_piece(self, ask: int, first: int, total: int, data: bytes) -> None:
        source, taken = self.taking.pop(ask)
        assert first == len(taken), "a piece out of turn"
        taken += data
        if len(taken) < total:
            self.taking[ask] = source, taken
            self.bridge.fetch(ask, source, len(taken))
            return
        assert taken == bytes_of(source), "other weights than were given"
        self.given.add(source)
        self.prepare(ask, cmd.UpdateWeights(0), source)

    def piece(self, source: str, first: int) -> tuple[bytes, int] | None:
        self.fleet.marks["pieces from a replica"] += source in self.given
        return (bytes_of(source)[first : first + PIECE], len(bytes_of(source))) if source in self.given else None

    def hold(self, holds: bool) -> None:
        self.held = holds

    def _publish(self, events: list[ev.Event], time: float) -> None:
        for event in events:
            self.bridge.told(event, self.fleet.wire.now, self.condition() if isinstance(event, ev.Done) else None)

    # The world

    def take(self, frames: list[bytes]) -> None:
        for happening in self.caller.take(frames, self.fleet.wire.now):
            if isinstance(happening, Arrived) and isinstance(happening.message, m.Submit):
                undecided = [one.order for one in self.bridge._orders.values() if not one.is_due]
                assert not undecided, f"a request between the phases of {undecided}"
            self.bridge.happened(happening)
            if isinstance(happening, Opened):
                self.holdings.begin()

    @property
    def has_something(self) -> bool:
        """Whether its loop would not wait."""
        return bool(
            self.inbox._commands or self.loop._in_flight or self.scheduler.can_act or self.scheduler.directive()
        )

    def step(self) -> None:
        is_busy = not self.held and self.has_something
        if is_busy and self.fleet.rng.random() < self.speed:
            self.loop.turn(block=False)
        for message, frames in self.bridge.flush():
            if self.caller.link is not None:
                self.caller.send(message, frames)
        if self.caller.link is not None:
            for held in self.holdings.messages(self.fleet.wire.now):
                self.fleet.marks["pages told"] += len(held.held)
                self.fleet.marks["pages told gone"] += len(held.gone)
                self.caller.send(held)
            num_steps = self.scheduler.requests.counters.num_steps
            self.caller.link.pulse = m.Beat(num_steps, self.bridge.has_work and is_busy)
        self._send_packets()
        if is_busy:
            self.wake_at = 0.0


class SimClient(Peer):
    """A client that lives through everything, and judges what it gets."""

    def __init__(self, fleet: Fleet, index: int) -> None:
        super().__init__(fleet, f"client-{index}")
        self.submissions = Submissions(fleet.config.page_size)
        self.next_ticket = 0
        self.requests: dict[int, Request] = {}
        self.went_on: dict[int, Checkpoint] = {}
        self.records: dict[tuple[int, int], ev.Record] = {}
        """By ticket and child."""
        self.ended: dict[int, ev.Record] = {}
        """The last record of each request of which every child has ended."""
        self.refused: dict[int, ev.Failure] = {}
        self.must_refuse: set[int] = set()
        self.aborted: set[int] = set()
        self.parts: dict[tuple[int, int], tuple[list[int], TokenScores]] = {}
        self.asked: dict[int, cmd.Command] = {}
        self.sources: dict[int, str] = {}
        """Of weights, by the tickets of their orders."""
        self.pins: list[int] = []
        self.taken: list[tuple[int, Checkpoint]] = []

    def ticket(self) -> int:
        self.next_ticket += 1
        return self.next_ticket - 1  # each client counts from its own zero

    def send(self, command: cmd.Command, source: str | None = None) -> None:
        if not isinstance(command, cmd.Submit | cmd.Abort):
            self.asked[command.ticket] = command
        if source is not None:
            self.sources[command.ticket] = source
        self._tell(self.submissions.send(command, source))
        self.wake_at = 0.0

    def take(self, frames: list[bytes]) -> None:
        for happening in self.caller.take(frames, self.fleet.wire.now):
            if isinstance(happening, Opened):
                self.fleet.marks["client sessions"] += 1
            if isinstance(happening, Arrived) and isinstance(happening.message, m.Fetch):
                self._give_piece(happening.message)
                continue
            self._tell(self.submissions.happened(happening, self.fleet.wire.now))

    def step(self) -> None:
        for message, frames in self.submissions.outgoing:
            self.caller.send(message, frames)
        self.submissions.outgoing.clear()
        self._send_packets()

    def _give_piece(self, fetch: m.Fetch) -> None:
        """Tensors are here until their order is answered."""
        if fetch.source not in [self.sources.get(ticket) for ticket in self.asked]:
            gone = ev.Failure("StateError", "they are not here any more")
            self.caller.send(m.Piece(fetch.ask, fetch.first, failure=gone))
            return
        data = bytes_of(fetch.source)
        piece = m.Piece(fetch.ask, fetch.first, len(data))
        self.caller.send(piece, [data[fetch.first : fetch.first + PIECE]])
        self.fleet.marks["pieces from a client"] += 1

    def pin_or_release(self) -> None:
        rng = self.fleet.rng
        if self.pins and rng.random() < 0.5:
            self.release(rng.choice(self.pins))
        else:
            tokens = rng.choice(self.fleet.traffic.bases)[: rng.randint(0, self.fleet.config.max_model_len)]
            self.send(cmd.PinPrefix(self.ticket(), tokens))

    def release(self, pin: int) -> None:
        self.pins.remove(pin)
        self.send(cmd.UnpinPrefix(self.ticket(), pin))

    def _tell(self, told: list[Told]) -> None:
        for event, _ in told:
            ticket = event.ticket
            match event:
                case ev.Ended(_, record, num_left):
                    assert ticket not in self.ended and ticket not in self.refused, f"two ends of {ticket}"
                    assert (ticket, record.child) not in self.records, f"two ends of child {record.child} of {ticket}"
                    self.records[ticket, record.child] = record
                    if not num_left:
                        self.ended[ticket] = record
                case ev.Refused(_, request_id, failure):
                    assert ticket not in self.ended and ticket not in self.refused, f"two ends of {ticket}"
                    assert request_id == self.requests[ticket].request_id
                    assert not any(one == ticket for one, _ in self.parts), f"{ticket} had begun: {failure}"
                    self.refused[ticket] = failure
                case ev.Progress(_, first, token_ids, scores, _, child):
                    listed = self.requests[ticket].params.logprob_token_ids
                    ids, log = self.parts.setdefault((ticket, child), ([], TokenScores(listed_ids=listed)))
                    assert (ticket, child) not in self.records and first == len(ids), "a token twice, or one is missing"
                    ids += token_ids
                    if scores is not None:
                        log.extend(scores)
                case ev.Taken(_, request_ticket, checkpoint):
                    del self.asked[ticket]
                    self.fleet.marks["checkpoints"] += 1
                    self.taken.append((request_ticket, checkpoint))
                case ev.Done():
                    order = self.asked.pop(ticket)
                    if isinstance(order, cmd.PinPrefix) and event.failure is None:
                        size = self.fleet.config.page_size
                        assert event.value == len(order.prompt_token_ids) // size * size
                        self.pins.append(ticket)
                    self.fleet.traffic.answered(order, event)

    @property
    def num_open(self) -> int:
        return len(self.requests) - len(self.ended) - len(self.refused)


def number_of(source: str) -> int:
    """Of the weights that come from there."""
    return int(source.removeprefix(m.OF_TENSORS).partition("-")[0])


def bytes_of(source: str) -> bytes:
    """Weights as they travel."""
    return source.encode()
