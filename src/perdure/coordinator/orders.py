"""What all replicas are asked together, agreed in two phases.

- Prepare: each says whether it could; nothing has changed yet. If one cannot, it is cancelled and nobody does it.
  Meanwhile no request is sent to a replica, so what was said stays true.
- Apply: each that was asked does it. Sessions keep the order of messages, so every replica sees every order at the
  same place among its requests, and the next order may be prepared while this one is still being carried out.
- One that could and then did not is out of step with the others: it is sent away, and brought into line when it comes
  again. A replica that is lost has no say any more.
- Who joins is brought into the agreed state (`agreement`) before any request goes to it. If the agreed weights were
  tensors, and nobody is left who has them, it waits for the next ones.
- A pin is at all replicas or at none, and at those that join; it goes with its client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api.ending import Failure
from perdure.api.errors import StateError
from perdure.coordinator.agreement import Agreed, Agreement
from perdure.coordinator.counts import Counts
from perdure.coordinator.membership import Members, Replica
from perdure.coordinator.messages import (
    OF_TENSORS,
    Answer,
    Apply,
    Ask,
    Asked,
    Cancel,
    Message,
    Prepare,
    Prepared,
)

NOBODY = (-1, 0)
"""Whom nobody answers: its client is gone, or it is the coordinator's own."""


class Round:
    """One order on its way. client: None = the coordinator's own, for one that joins. told: sessions that were asked to
    prepare it. waits: those yet to speak. last: the request that came last before it."""

    def __init__(
        self, ask: int, client: tuple[int, int] | None, order: Asked, source: str | None, last: int = 0
    ) -> None:
        self.ask = ask
        self.last = last
        self.client = client
        self.order = order
        self.source = source
        self.told: list[int] = []
        self.waits: dict[int, None] = {}
        self.failures: dict[int, Failure] = {}
        self.done: list[Answer] = []

    @property
    def is_order(self) -> bool:
        """Whether it changes anything, so that all must agree before."""
        return isinstance(self.order, cmd.Order)


class Orders:
    """refusal(order): why the requests of now forbid it. send(session, message): at once, so that what is decided here
    and requests stand in one line. What else comes of orders is collected for the router to take.

    to_answer: ((client, ask), answer). to_close: replicas out of step. joined: brought
    into line, and may serve. changed: the weights or the prefix caches of all. ends_up_to: the last of the requests
    that a pause ends, wherever they are.
    """

    def __init__(
        self,
        members: Members,
        blocking: bool,
        refusal: Callable[[Asked], str | None],
        send: Callable[[int, Message], None],
    ) -> None:
        self.agreement = Agreement()
        self.num_calls = {"blocking": 0, "by messages": 0}
        """Phases so far: each is one call of all replicas. There is none per step."""
        self.to_answer: list[tuple[tuple[int, int], Answer]] = []
        self.to_close: list[int] = []
        self.joined: list[int] = []
        self.changed = False
        self.ends_up_to = 0
        self.stopped = False
        self._is_stopping = False
        self._members = members
        self._blocking = blocking
        self._refusal = refusal
        self._send = send
        self._next = 1
        self._queue: deque[Round] = deque()
        self._preparing: Round | None = None
        self._applied: dict[int, Round] = {}
        self._aligning: dict[int, int] = {}
        """How many answers each that joins still owes."""
        self._to_align: dict[int, None] = {}
        self._counts = Counts()
        self._pins: dict[int, Round] = {}
        """Those that hold, or are on their way, by the number that names them at replicas."""

    @property
    def agreed(self) -> Agreed:
        return self.agreement.now

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    def holder_of(self, source: str, but: int) -> int | None:
        """Who has weights that were given as tensors: the client that gives them now, or a replica other than `but`."""
        one = self._preparing
        if one is not None and one.source == source and one.client is not None and one.client != NOBODY:
            return one.client[0]
        holders = (r.session for r in self._members.all if r.about.source == source and r.session != but)
        return next(holders, None)

    @property
    def holds_requests(self) -> bool:
        """Whether no request may be sent to a replica now."""
        return self._preparing is not None or bool(self._queue)

    # What comes in

    def ask(self, client: int, asked: Ask, last: int) -> None:
        """last: the number of the request that came last."""
        one = Round(self._number(), (client, asked.ask), asked.order, asked.source, last)
        if isinstance(one.order, cmd.UnpinPrefix):  # from a client's name for the pin to ours
            one.order = cmd.UnpinPrefix(0, self._pin_of(client, one.order.pin))
        elif isinstance(one.order, cmd.PinPrefix):
            self._pins[one.ask] = one
        self._queue.append(one)
        self._go_on()

    def _pin_of(self, client: int, ask: int) -> int:
        return next((number for number, pin in self._pins.items() if pin.client == (client, ask)), 0)

    def _release(self, pin: int) -> None:
        self._queue.append(Round(self._number(), NOBODY, cmd.UnpinPrefix(0, pin), None))

    def stop(self) -> None:
        """Tell everybody to stop. Nothing happens the second time."""
        if not self._is_stopping:
            self._is_stopping = True
            self._queue.append(Round(self._number(), NOBODY, cmd.Stop(0), None))
            self._go_on()

    def prepared(self, session: int, word: Prepared) -> None:
        one = self._preparing
        if one is None or one.ask != word.ask:
            return
        if word.failure is not None:
            one.failures[session] = word.failure
        one.waits.pop(session, None)
        self._go_on()

    def answered(self, session: int, answer: Answer) -> None:
        one = self._applied.get(answer.ask)
        if one is None or session not in one.waits:
            return
        self._note(session, one, answer)
        del one.waits[session]
        if answer.failure is not None:
            one.failures[session] = answer.failure
        else:
            one.done.append(answer)
            self._count_of(session, one.order, answer)
        if one.client is None:
            self._aligned(one, session)
        self._go_on()

    def _note(self, session: int, one: Round, answer: Answer) -> None:
        """What its engine is like after this."""
        replica = self._members.get(session)
        if replica is None or answer.fingerprint is None:
            return
        about = replace(
            replica.about, fingerprint=answer.fingerprint, state=answer.state, weight_epoch=answer.weight_epoch
        )
        if isinstance(one.order, cmd.UpdateWeights) and one.order.has_weights and answer.failure is None:
            assert one.source is not None
            about = replace(about, source=one.source)
        replica.about = about

    def _count_of(self, session: int, order: Asked, answer: Answer) -> None:
        """A session's answers come in the order that they were given in, so what it counted before a reset is gone."""
        replica = self._members.get(session)
        if replica is not None and isinstance(order, cmd.Reset):
            self._counts.reset(replica.name)
        elif replica is not None and answer.stats is not None:
            self._counts.note(replica.name, answer.stats)

    def join(self, session: int) -> None:
        """It serves once it is in line with the others."""
        self._to_align[session] = None
        self._go_on()

    def leave(self, replica: Replica) -> None:
        """Nobody waits for it any more."""
        session = replica.session
        self._counts.leave(replica.name)
        self._to_align.pop(session, None)
        self._aligning.pop(session, None)
        for one in [*([self._preparing] if self._preparing else []), *self._applied.values()]:
            one.waits.pop(session, None)
            one.failures.pop(session, None)
        self._go_on()

    def forget_client(self, client: int) -> None:
        """What it asked is carried out, and nobody hears of it; what it pinned is released."""
        for number, pin in self._pins.items():
            if pin.client is not None and pin.client[0] == client:
                self._release(number)
        for one in [*self._queue, *([self._preparing] if self._preparing else []), *self._applied.values()]:
            if one.client is not None and one.client[0] == client:
                one.client = NOBODY
        self._go_on()

    # Going on

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _go_on(self) -> None:
        """As far as it goes now."""
        while True:
            self._finish()
            if self._preparing is not None:
                if self._preparing.waits:
                    return
                one, self._preparing = self._preparing, None
                if one.failures:
                    self._cancel(one)
                else:
                    self._apply(one)
            elif self._to_align and not self._applied:
                self._align(next(iter(self._to_align)))
            elif self._queue and not self._aligning:
                self._begin(self._queue.popleft())
            else:
                return

    def _everybody(self, order: Asked) -> list[Replica]:
        """Whom an order is for. Weights reach those too that could not get the ones before."""
        brings_weights = isinstance(order, cmd.UpdateWeights) and order.has_weights
        return [*self._members.serving, *(self._without_weights() if brings_weights else [])]

    def _without_weights(self) -> list[Replica]:
        return [replica for replica in self._members.all if replica.lacks_weights]

    def _begin(self, one: Round) -> None:
        if (why := self._refusal(one.order)) is not None:
            self._reply(one, Answer(one.ask, Failure.of(StateError(why))))
            return
        if isinstance(one.order, cmd.UnpinPrefix):
            self._pins.pop(one.order.pin, None)
        one.told = [replica.session for replica in self._everybody(one.order)]
        for session in one.told:
            self._send(session, self._prepare(one))
        if not one.is_order:
            self._apply(one)
            return
        one.waits = dict.fromkeys(one.told)
        self._count()
        self._preparing = one

    def _told(self, one: Round) -> list[Replica]:
        """Whoever is asked hears what was decided, whatever became of it meanwhile: until then it does nothing else."""
        return [replica for session in one.told if (replica := self._members.get(session)) is not None]

    def _prepare(self, one: Round) -> Prepare:
        return Prepare(one.ask, one.order, one.source, self._blocking and one.is_order)

    def _count(self) -> None:
        self.num_calls["blocking" if self._blocking else "by messages"] += 1

    def _apply(self, one: Round) -> None:
        for replica in self._told(one):
            replica.was_told(one.ask, one.order)
            self._send(replica.session, Apply(one.ask))
            one.waits[replica.session] = None
        if one.is_order:
            self._count()
        self._applied[one.ask] = one
        self.changed = self.changed or isinstance(one.order, cmd.Reset | cmd.ResetPrefixCache | cmd.UpdateWeights)
        if isinstance(one.order, cmd.Pause) and one.order.mode == "abort":
            self.ends_up_to = max(self.ends_up_to, one.last)

    def _cancel(self, one: Round) -> None:
        for replica in self._told(one):
            self._send(replica.session, Cancel(one.ask))
        self._reply(one, Answer(one.ask, self._named(one)))

    def _finish(self) -> None:
        for one in [one for one in self._applied.values() if not one.waits]:
            del self._applied[one.ask]
            if one.client is None:
                continue
            if isinstance(one.order, cmd.PinPrefix) and one.failures:
                self._release(one.ask)
                self._reply(one, Answer(one.ask, self._named(one)))
                continue
            if one.failures and not one.done:  # it took place nowhere
                self._reply(one, Answer(one.ask, self._named(one)))
                continue
            if isinstance(one.order, cmd.UpdateWeights) and not one.done:
                lost = StateError("no replica is left that could take these weights, or say that they are whole")
                self._reply(one, Answer(one.ask, Failure.of(lost)))
                continue
            self.to_close += one.failures
            self.agreement.took_place(one.order, one.source, one.done)
            self.stopped = self.stopped or isinstance(one.order, cmd.Stop)
            if isinstance(one.order, cmd.Reset):
                self._counts.reset_gone()
            self._to_align.update(dict.fromkeys(self._got_weights(one)))
            stats = None
            if isinstance(one.order, cmd.GetStats):
                found = [answer.stats for answer in one.done if answer.stats is not None]
                stats = self._counts.together(found, self.agreed.state, self.agreed.weight_epoch)
            self._reply(one, Answer(one.ask, None, stats))

    def _named(self, one: Round) -> Failure:
        session, failure = next(iter(one.failures.items()))
        replica = self._members.get(session)
        where = "" if replica is None else f"replica {replica.index}: "
        return Failure(failure.kind, where + failure.message)

    def _reply(self, one: Round, answer: Answer) -> None:
        assert one.client is not None
        client, ask = one.client
        if client >= 0:
            self.to_answer.append((one.client, Answer(ask, answer.failure, answer.stats)))

    def _got_weights(self, one: Round) -> list[int]:
        """Replicas that had none, and now have the agreed ones."""
        if not isinstance(one.order, cmd.UpdateWeights):
            return []
        found = [replica for replica in self._without_weights() if replica.about.source == self.agreed.source]
        for replica in found:
            replica.lacks_weights = False
        return [replica.session for replica in found]

    # Joining

    def _align(self, session: int) -> None:
        """Ask one that joins for what brings it into line."""
        del self._to_align[session]
        replica = self._members.get(session)
        if replica is None:
            return
        if self.agreement.adopt(replica.about, is_alone=len(self._members.all) == 1):
            for other in self._members.serving:
                if self.agreement.missing(other.about):
                    self._members.serve(other.session, False)
                    self._to_align[other.session] = None
        rounds = [Round(self._number(), None, *order) for order in self.agreement.missing(replica.about)]
        if not rounds:
            self._let_in(replica)
            return
        self._aligning[session] = len(rounds)
        for one in rounds:
            one.waits[session] = None
            self._applied[one.ask] = one
            self._send(session, Prepare(one.ask, one.order, one.source))
            self._send(session, Apply(one.ask))

    def _aligned(self, one: Round, session: int) -> None:
        replica = self._members.get(session)
        if session not in self._aligning or replica is None:
            return
        if one.failures:
            self._aligning.pop(session)
            if (one.source or "").startswith(OF_TENSORS):
                replica.lacks_weights = True
            else:
                self.to_close.append(session)
            return
        self._aligning[session] -= 1
        if not self._aligning[session]:
            del self._aligning[session]
            self._let_in(replica)

    def _let_in(self, replica: Replica) -> None:
        """It serves, and holds what is pinned. Nobody waits for that: one that has no room serves all the same."""
        session = replica.session
        self.joined.append(session)
        self._members.serve(session, True)
        begun = {number: pin.order for number, pin in self._pins.items() if pin not in self._queue}
        told = [(number, order) for number, order in begun.items() if number not in replica.pins]
        told += [(self._number(), cmd.UnpinPrefix(0, number)) for number in replica.pins if number not in begun]
        for number, order in told:
            replica.was_told(number, order)
            self._send(session, Prepare(number, order))
            self._send(session, Apply(number))

    def check_idle(self) -> None:
        """Nobody waits for anything. Raises AssertionError."""
        assert not (self._queue or self._preparing or self._applied or self._aligning or self._to_align or self._pins)
