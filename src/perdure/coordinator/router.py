"""`Router`: the coordinator's core. Messages and the time come in, messages come out; no socket, no clock, no thread.

- A request goes to one replica and stays there until its terminal reply, or until that replica is lost. Then it goes
  on at another from the ids that are known here, and laws 3 and 8 make the result the same; or it fails, once.
- A terminal reply retires the entry everywhere (`entries`); a partial one releases nothing. What comes of a session
  that is over is never seen here, so a lost replica cannot answer late, nor a client hear of an end twice.
- Where no replica serves, requests wait, up to a limit. Submitted frames are bounded in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api.config import EngineConfig, OnReplicaLoss, RoutingPolicy
from perdure.api.ending import Ending, Failure
from perdure.api.errors import InvalidValue, PerdureError, QueueFull, ReplicaLost, StateError
from perdure.api.output import Stats
from perdure.coordinator import messages as m
from perdure.coordinator.affinity import Chooser
from perdure.coordinator.entries import Entries, Entry
from perdure.coordinator.fetches import Fetches
from perdure.coordinator.link import Frames
from perdure.coordinator.membership import STALL_S, Members, Replica
from perdure.coordinator.orders import Orders
from perdure.coordinator.sessions import SILENCE_S, Arrived, Happening, Lost, Opened
from perdure.coordinator.takes import Takes

MOST_BYTES = 2**30
"""Of submitted frames that are kept."""
NOT_LIVE = Failure.of(InvalidValue("the request is not live: it has ended, or never began"))
MOST_FRUITLESS = 5
"""A request whose replicas were lost so often in a row, without a new token, may be what kills them: it fails."""


class Routing(NamedTuple):
    """What a user may decide about routing (`EngineConfig`)."""

    policy: RoutingPolicy = "longest_prefix"
    alpha: float = 0.5
    affinity_ttl: float = 300.0
    on_replica_loss: OnReplicaLoss = "resume"
    replica_wait_s: float = 60.0
    blocking_collectives: bool = False
    silence_s: float = SILENCE_S
    stall_s: float = STALL_S
    most_bytes: int = MOST_BYTES

    @staticmethod
    def of(config: EngineConfig) -> Routing:
        return Routing(
            config.routing_policy,
            config.routing_alpha,
            config.affinity_ttl,
            config.on_replica_loss,
            config.replica_wait_s,
            config.blocking_collectives,
            config.replica_silence_s,
            config.replica_stall_s,
        )


class Router:
    """outgoing: (session, message, frames) to send, in order; taken by `take_outgoing`. closed: sessions to end."""

    def __init__(self, routing: Routing) -> None:
        self.outgoing: list[tuple[int, m.Message, Frames]] = []
        self.closed: list[int] = []
        self._growing: dict[int, tuple[m.Parts, list[bytes]]] = {}
        """By client, the parts that are the last of what it is to be sent: those of other replicas join them."""
        self.entries = Entries()
        self.members = Members(routing.stall_s)
        self.num_lost_replicas = 0
        self.num_moved = 0
        self._routing = routing
        self._chooser = Chooser(routing.policy, routing.alpha, routing.affinity_ttl)
        self.orders = Orders(self.members, routing.blocking_collectives, self._refusal_of_order, self._send)
        self._clients: dict[int, str] = {}
        self._takes = Takes(self._send)
        self._fetches = Fetches()
        self._details: bytes | None = None
        self._num_told = 0
        """How many replicas serve, as clients were told last."""
        self._drains_until: float | None = None
        """When the end comes, whatever is left; None = it is not near."""

    @property
    def is_stopped(self) -> bool:
        """Whether everybody was told to stop, and has."""
        return self.orders.stopped

    def refusal(self, hello: m.Hello) -> str | None:
        """Why a caller is not wanted."""
        kind = self.members.kind
        if hello.about is None or kind is None or hello.about.kind == kind:
            return None
        return f"this replica is of another kind than those here: {hello.about.kind!r} instead of {kind!r}"

    # What comes in

    def take(self, happening: Happening, now: float) -> None:
        match happening:
            case Opened(session, hello):
                self._opened(session, hello, now)
            case Lost(session):
                self._lost(session, now)
            case Arrived(session, message, frames):
                if session in self._clients:
                    self._from_client(session, message, frames, now)
                elif (replica := self.members.get(session)) is not None:
                    self._from_replica(replica, message, frames, now)
        self._follow_orders(now)

    def tick(self, now: float) -> None:
        """Once in a while: who hangs, who has waited long enough."""
        for session in self.members.stalled(now):
            self.closed.append(session)
            self._lost(session, now)
        if self._drains_until is not None and not (len(self.entries) and now < self._drains_until):
            for entry in self.entries.waiting:
                self._end(entry, Ending("abort"))
            self.orders.stop()
        for entry in self.entries.waiting:
            if entry.deadline is None and not self.members.serving:
                entry.deadline = now + self._routing.replica_wait_s
            elif entry.deadline is not None and now >= entry.deadline:
                waited = f"no replica served for {self._routing.replica_wait_s:g} s (replica_wait_s)"
                self._fail(entry, ReplicaLost(waited))
        self._follow_orders(now)

    def drain(self, until: float) -> None:
        """Take no new request; when none is left, or then, everybody stops."""
        if self._drains_until is None:
            self._drains_until = until

    def _opened(self, session: int, hello: m.Hello, now: float) -> None:
        if hello.about is None:
            for old in [old for old, name in self._clients.items() if name == hello.name]:
                self._supersede(old, now)
            self._clients[session] = hello.name
            if self._details is not None:
                self._welcome(session)
            return
        old_self = self.members.named(hello.name)
        if old_self is not None:
            self._supersede(old_self.session, now)
        self.members.join(Replica(session, hello.name, hello.about, now))
        self.orders.join(session)

    def _supersede(self, session: int, now: float) -> None:
        """A peer has called again: its session before is over."""
        self.closed.append(session)
        self._lost(session, now)

    def _welcome(self, client: int) -> None:
        assert self._details is not None
        self._send(client, m.Welcome(len(self.members.serving)), [self._details])

    # Clients

    def _from_client(self, client: int, message: m.Message, frames: Frames, now: float) -> None:
        match message:
            case m.Submit(number, keys, known):
                self._submit(client, number, keys, known, frames, now)
            case m.Abort(numbers, everything):
                entries = self.entries.of_client(client) if everything else [self._named(client, n) for n in numbers]
                self._abort([entry for entry in entries if entry is not None])
            case m.Take(ask, number, end):
                self._take(client, ask, number, end)
            case m.Ask():
                self.orders.ask(client, message, self.entries.last)
            case m.Piece():
                self._fetches.answered(client, message, frames)
            case m.Look(ask):
                self._send(client, m.Seen(ask, self.members.status(self.entries.load, now), self._owners(client)))

    def _owners(self, client: int) -> list[tuple[int, int]]:
        """Which replica has which of a client's requests."""
        owned = [(entry.number, self.members.get(entry.owner or 0)) for entry in self.entries.of_client(client)]
        return [(number, replica.index) for number, replica in owned if replica is not None]

    def _named(self, client: int, number: int) -> Entry | None:
        return self.entries.named(client, number)

    def _submit(
        self, client: int, number: int, keys: list[bytes], known: m.Known | None, frames: Frames, now: float
    ) -> None:
        size = sum(map(len, frames)) + sum(map(len, keys))
        if self.entries.num_bytes + size > self._routing.most_bytes:
            kept, most = self.entries.num_bytes, self._routing.most_bytes
            error = QueueFull(f"the coordinator keeps {kept} bytes of requests already, and at most {most}")
            self._send(client, m.Refused(number, Failure.of(error)))
            return
        if self.entries.named(client, number) is not None:
            self._send(client, m.Refused(number, Failure.of(InvalidValue(f"number={number} is live"))))
            return
        if self._drains_until is not None:
            why = "the coordinator is about to stop: it takes no more requests"
            self._send(client, m.Refused(number, Failure.of(StateError(why))))
            return
        entry = self.entries.add(client, number, frames, keys)
        if known is not None:
            entry.recall(known)
        self._place([entry], now)

    def _abort(self, entries: list[Entry]) -> None:
        by_owner: dict[int, list[int]] = {}
        for entry in entries:
            entry.is_aborted = True
            if entry.owner is None:
                self._end(entry, Ending("abort"))
            else:
                by_owner.setdefault(entry.owner, []).append(entry.serial)
        for owner, serials in by_owner.items():
            self._send(owner, m.Abort(serials))

    def _take(self, client: int, ask: int, number: int, end: bool) -> None:
        entry = self.entries.named(client, number)
        if entry is None:
            self._send(client, m.Taken(ask, NOT_LIVE))
            return
        entry.takes.append((ask, end))
        if entry.owner is not None:
            self._takes.ask(entry, entry.owner)

    # Replicas

    def _from_replica(self, replica: Replica, message: m.Message, frames: Frames, now: float) -> None:
        session = replica.session
        match message:
            case m.Parts():
                self._parts(session, message, frames)
            case m.Beat():
                replica.beat(message, now)
            case m.Admitted(serial):
                if (entry := self.entries.owned(session, serial)) is not None:
                    entry.admitted = message
                    entry.is_begun = True
                    if entry.client is not None:
                        told = replace(message, number=entry.number, fingerprint=replica.about.fingerprint)
                        self._send(entry.client, told)
            case m.Ended(serial) | m.Refused(serial):
                if (entry := self.entries.owned(session, serial)) is not None:
                    if entry.client is not None:
                        self._send(entry.client, replace(message, number=entry.number), frames)
                    self._ended(entry, message)
            case m.Taken():
                self._takes.answered(message, frames)
            case m.Prepared():
                self.orders.prepared(session, message)
            case m.Answer():
                self.orders.answered(session, message)
            case m.Held(is_anew, held, gone):
                self._chooser.holds(session, is_anew, held, gone, now)
            case m.Fetch(_, source):
                self._fetches.ask(session, message, self.orders.holder_of(source, session))
            case m.Piece():
                self._fetches.answered(session, message, frames)
            case m.Leave():
                self._supersede(session, now)
                self.members.lost.pop(replica.index, None)

    def _ended(self, entry: Entry, message: m.Ended | m.Refused) -> None:
        if isinstance(message, m.Ended) and message.num_left:
            assert message.child is not None
            sample = entry.sample(message.child)
            for span in message.spans:
                sample.grow(span.first, span.token_ids, span.epoch)
            sample.ending = message.ending
        else:
            self.entries.retire(entry)

    def _parts(self, session: int, parts: m.Parts, frames: Frames) -> None:
        """New tokens: noted here, and passed on to whom they belong, with those that wait already."""
        for at, serial in enumerate(parts.numbers):
            entry = self.entries.owned(session, serial)
            if entry is None:
                continue
            child, first, token_ids, epoch = parts.children[at], parts.firsts[at], parts.token_ids[at], parts.epochs[at]
            if token_ids:
                entry.sample(child).grow(first, token_ids, epoch)
            if entry.client is None:
                continue
            found = self._growing.get(entry.client)
            if found is None:
                found = m.Parts([], [], [], [], []), list[bytes]()
                self._send(entry.client, *found)
                self._growing[entry.client] = found
            theirs, own = found
            theirs.numbers.append(entry.number)
            theirs.children.append(child)
            theirs.firsts.append(first)
            theirs.epochs.append(epoch)
            theirs.token_ids.append(token_ids)
            own.append(frames[at])

    # Losing

    def _lost(self, session: int, now: float) -> None:
        """A session is over, whoever it was."""
        self._fetches.lost(session)
        if self._clients.pop(session, None) is not None:
            self.orders.forget_client(session)
            self._takes.forget_client(session)
            theirs = self.entries.of_client(session)
            for entry in theirs:
                self.entries.orphan(entry)
            self._abort(theirs)
            return
        replica = self.members.leave(session)
        if replica is None:
            return
        self.num_lost_replicas += 1
        self.members.lose(replica, now)
        self._chooser.table.forget(session)
        self._takes.lost(session)
        self.orders.leave(replica)
        self._go_on_elsewhere(replica, now)

    def _go_on_elsewhere(self, replica: Replica, now: float) -> None:
        moved: list[Entry] = []
        for entry in self.entries.of_owner(replica.session):
            entry.fingerprint = replica.about.fingerprint
            entry.num_moves += 1
            if entry.num_output > entry.num_was_known:
                entry.num_fruitless = 0
            else:
                entry.num_fruitless += entry.is_begun
            self.entries.take_back(entry)
            if entry.is_aborted:
                self._end(entry, Ending("abort"))
            elif self._routing.on_replica_loss == "fail":
                self._fail(entry, ReplicaLost(f"replica {replica.index}, which computed this request, was lost"))
            elif entry.num_fruitless >= MOST_FRUITLESS:
                times = f"{entry.num_fruitless} replicas were lost one after another while they had this request"
                self._fail(entry, ReplicaLost(f"{times}, and none gave a token"))
            else:
                moved.append(entry)
        self.num_moved += len(moved)
        self._place(moved, now)

    def _fail(self, entry: Entry, error: PerdureError) -> None:
        self._end(entry, Ending("error", failure=Failure.of(error)))

    def _end(self, entry: Entry, ending: Ending) -> None:
        """The end of a request that no replica has, told by the coordinator itself."""
        if entry.client is not None:
            seed = 0 if entry.admitted is None else entry.admitted.seed
            exact = all(sample.exact for sample in entry.samples)
            rest = m.Rest(ending, seed=seed, exact=exact, num_checkpoints=entry.num_moves)
            self._send(entry.client, m.Ended(entry.number, None), [msgspec.msgpack.encode(rest)])
            for ask, _ in entry.takes:
                self._send(entry.client, m.Taken(ask, NOT_LIVE))
        self.entries.retire(entry)

    # Placing

    def _place(self, entries: Sequence[Entry], now: float) -> None:
        """Send waiting requests to replicas, if there are any."""
        serving = self.members.serving
        for entry in entries if not serving else ():
            if entry.deadline is None:
                entry.deadline = now + self._routing.replica_wait_s
        if not serving or self.orders.holds_requests:
            return
        sessions = [replica.session for replica in serving] if entries else []
        for entry in entries:
            owner = self._chooser.choose(entry.keys, self.entries.loads(sessions), now)
            again = entry.num_moves > 0
            self._send(owner, m.Submit(entry.serial, known=entry.known(), again=again), entry.frames)
            replica = self.members.get(owner)
            assert replica is not None
            if entry.fingerprint != replica.about.fingerprint:
                for sample in entry.samples:
                    sample.cross()
            self.entries.give(entry, owner)
            self._takes.ask(entry, owner)

    # Orders

    def _refusal_of_order(self, order: m.Asked) -> str | None:
        if isinstance(order, cmd.Reset) and len(self.entries):
            return f"reset needs an engine without requests: {len(self.entries)} are outstanding"
        if isinstance(order, cmd.Reset) and self.orders.num_pins:
            return f"reset needs an engine without pinned prefixes: {self.orders.num_pins} are not released"
        return None

    def _follow_orders(self, now: float) -> None:
        """Do what came of orders: answer, let in, send away."""
        orders = self.orders
        for session, message, frames in self._fetches.to_send:
            self._send(session, message, frames)
        self._fetches.to_send.clear()
        if orders.ends_up_to:
            self._abort([entry for entry in self.entries.all if entry.serial <= orders.ends_up_to])
            orders.ends_up_to = 0
        for (client, ask), answer in orders.to_answer:
            if client in self._clients:
                self._send(client, replace(answer, ask=ask, stats=self._as_seen_by(client, answer)))
        orders.to_answer.clear()
        if orders.changed:
            orders.changed = False
            self._chooser.table.clear()
        while orders.to_close:
            self._supersede(orders.to_close.pop(), now)
        if orders.joined:
            for session in orders.joined:
                if self._details is None and (replica := self.members.get(session)) is not None:
                    self._details = replica.about.details
            orders.joined.clear()
        if self._details is not None and len(self.members.serving) != self._num_told:
            self._num_told = len(self.members.serving)
            for client in self._clients:
                self._welcome(client)
        if self.entries.num_waiting and self.members.serving:
            self._place(self.entries.waiting, now)

    def _as_seen_by(self, client: int, answer: m.Answer) -> Stats | None:
        """Ids of paused requests are the client's own numbers, and others' are not its business."""
        if answer.stats is None:
            return None
        serials = {entry.serial: entry.number for entry in self.entries.of_client(client)}
        paused = [serials[name] for name in answer.stats.paused_ids if isinstance(name, int) and name in serials]
        return replace(answer.stats, paused_ids=paused)

    def _send(self, session: int, message: m.Message, frames: Frames = ()) -> None:
        self._growing.pop(session, None)
        self.outgoing.append((session, message, frames))

    def take_outgoing(self) -> list[tuple[int, m.Message, Frames]]:
        """What is to be sent now."""
        taken, self.outgoing = self.outgoing, []
        self._growing.clear()
        return taken

    def check_idle(self) -> None:
        """Nothing is left of anything. Raises AssertionError."""
        assert not len(self.entries) and not self.entries.num_bytes and not len(self._takes) and not len(self._fetches)
        self.entries.check()
        self.orders.check_idle()
