"""The orders of a simulated life: pauses, suspensions, resets, weights; and what each must be answered with.

- The view kept here is the client's: what holds once every order sent so far is carried out.
- Weights are numbers, and an epoch names them; epochs moved alone are numbers from 100 on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from perdure.api import command as cmd
from perdure.api.event import Failure, Record

if TYPE_CHECKING:
    from tests.sim.life import Life


class Orders:
    """Gives orders at random, at most one unanswered where the device may fail, so that the view stays right."""

    def __init__(self, life: Life) -> None:
        self.life = life
        rng = life.rng
        shares = {"suspend": 0.6, "update": 0.4, "epoch": 0.3, "reset": 0.3}
        self.kinds = [kind for kind, share in shares.items() if life.is_stormy or rng.random() < share]
        self.policies = [("invalidate", "recompute"), ("salt", "recompute")]
        if rng.random() < 0.3:
            self.policies += [("keep", "recompute"), ("invalidate", "keep"), ("keep", "keep"), ("salt", "keep")]
        self.keeps = False
        self.halt: str | None = None
        self.is_halted = False
        """Whether the halt was answered: no token may come."""
        self.is_pausing = False
        self.kv_asleep = False
        self.weights_asleep = False
        self.weights_whole = True
        self.weights = 0
        """By name, as of all orders sent."""
        self.staged: dict[int, int] = {}
        """Every update's, by ticket."""
        self._loaded = 0
        self._weights_of_epoch = {0: 0}
        self._unanswered: dict[int, tuple[cmd.Order, bool | None]] = {}
        """Whether each must succeed; None = it depends."""
        self._halt_tickets: set[int] = set()
        self._next_epoch = 100
        self._era = 0
        self._arrivals: list[tuple[int, int]] = []
        self._num_refused_late: Counter[int] = Counter()
        """By era: those that had an arrival when they were refused, every child counted."""
        self._weights_at_end: dict[tuple[int, int], int] = {}

    @property
    def is_suspended(self) -> bool:
        return self.halt == "suspended"

    # Giving

    def give(self) -> None:
        """Some order, or none."""
        if self._unanswered and (self.life.faulty_device or self.life.rng.random() < 0.7):
            return
        rng = self.life.rng
        kind = rng.choice(("pause", "resume", "resume", *self.kinds))
        match kind:
            case "pause" if rng.random() < 0.6:
                mode: cmd.PauseMode = rng.choice(("keep", "keep", "wait", "abort"))
                if not self.halt:
                    self._halt("paused", cmd.Pause(self.life.ticket(), mode))
            case "suspend":
                self._suspend()
            case "resume" if self.is_suspended and rng.random() < 0.3:
                self._resume([rng.choice(("weights", "kv"))])
            case "resume" if self._may_resume():
                self._resume(None)
            case "update":
                self._update(*rng.choice(self.policies))
            case "epoch":
                self._next_epoch += 1
                self._send(cmd.UpdateWeights(self.life.ticket(), self._next_epoch, has_weights=False), True)
            case "reset":
                self._send(cmd.Reset(self.life.ticket()), False if self.is_suspended else None)

    def go_on(self) -> None:
        """One order nearer to a running engine."""
        if self._unanswered and (self.life.faulty_device or self.is_pausing):
            return
        if self.is_suspended and not self.weights_whole:
            if self.weights_asleep:
                self._resume(["weights"])
            else:
                self._update("invalidate", "recompute")
        elif self.halt and self._may_resume():
            self._resume(None)

    def _may_resume(self) -> bool:
        """Whether a resume may help a pause that is not answered yet; else it must come by itself."""
        return not self.is_pausing or self.life.cancels

    def _send(self, order: cmd.Order, succeeds: bool | None) -> None:
        self._unanswered[order.ticket] = order, None if self.life.faulty_device else succeeds
        self.life.send(order)

    def _halt(self, halt: str, order: cmd.Order) -> None:
        self.halt = halt
        self._halt_tickets.add(order.ticket)
        self.is_pausing = self.is_pausing or isinstance(order, cmd.Pause)
        self._send(order, True)

    def _suspend(self) -> None:
        rng = self.life.rng
        kv: cmd.KVMode = rng.choice(("persist", "offload", "recompute"))
        weights: cmd.WeightsMode = rng.choice(("keep", "keep", "offload", "drop"))
        if self.is_suspended:
            self._send(cmd.Suspend(self.life.ticket(), kv, weights), True)
            return
        self._halt("suspended", cmd.Suspend(self.life.ticket(), kv, weights))
        self.kv_asleep = True
        self.weights_asleep = weights != "keep"
        self.weights_whole = weights != "drop"

    def _resume(self, tags: list[cmd.Tag] | None) -> None:
        """Whatever wakes: a refusal changes nothing."""
        wakes_kv, wakes_weights = tags is None or "kv" in tags, tags is None or "weights" in tags
        succeeds = not (self.is_suspended and wakes_kv and not self.weights_whole)
        if succeeds:
            self.kv_asleep = self.kv_asleep and not wakes_kv
            self.weights_asleep = self.weights_asleep and not wakes_weights
            if not self.is_suspended or not (self.kv_asleep or self.weights_asleep):
                self._run()
        self._send(cmd.Resume(self.life.ticket(), tags), succeeds)

    def _run(self) -> None:
        self.halt = None
        self.is_halted = self.is_pausing = False
        self._halt_tickets.clear()

    def _update(self, cache: cmd.CachePolicy, in_flight: cmd.InFlightPolicy) -> None:
        weights, ticket = self.life.rng.randrange(4), self.life.ticket()
        asleep = self.is_suspended and self.weights_asleep
        succeeds = not asleep and not (cache == "salt" and weights == self.weights)
        self.life.device.staged[ticket] = self.staged[ticket] = weights
        if succeeds or self.life.faulty_device:
            self.keeps = self.keeps or "keep" in (cache, in_flight)
        if succeeds:
            self.weights, self.weights_whole = weights, True
        self._send(cmd.UpdateWeights(ticket, weights, True, cache, in_flight), succeeds)

    # Answers

    def answered(self, ticket: int, failure: Failure | None) -> None:
        if ticket not in self._unanswered:
            return
        order, succeeds = self._unanswered.pop(ticket)
        assert succeeds is None or succeeds == (failure is None), (order, failure)
        self.life.marks[f"{type(order).__name__} {'refused' if failure else 'done'}"] += 1
        if isinstance(order, cmd.Pause):
            self.is_pausing = any(isinstance(other, cmd.Pause) for other, _ in self._unanswered.values())
        if failure is None:
            self._took_place(order)
        elif failure.kind == "DeviceError":
            self._failed(order)
        if self.life.faulty_device:
            self._look()

    def _took_place(self, order: cmd.Order) -> None:
        if order.ticket in self._halt_tickets:
            self.is_halted = True
        match order:
            case cmd.UpdateWeights(_, epoch, has_weights):
                assert epoch is not None
                if has_weights:
                    self._loaded = epoch
                self._weights_of_epoch[epoch] = self._loaded
            case cmd.Reset():
                stats = self.life.scheduler.stats()
                assert stats.num_requests == stats.num_steps == self.life.scheduler.num_live == 0
                self._era += 1
            case cmd.Suspend(ticket, kv) if ticket in self._halt_tickets:
                stats = self.life.scheduler.stats()
                assert kv != "recompute" or stats.num_free_pages == stats.num_pages
                self.life.marks[f"suspended by {kv}"] += stats.num_running + stats.num_waiting > 0

    def _failed(self, order: cmd.Order) -> None:
        self.life.marks[f"{type(order).__name__} failed"] += 1

    def _look(self) -> None:
        """The view after something failed: the engine's own."""
        control = self.life.scheduler._control
        residency, state = control._residency, control.state.value
        self.halt = None if state == "running" and not self.is_pausing else "paused" if state == "running" else state
        self.is_halted = state in ("paused", "suspended")
        self.kv_asleep, self.weights_asleep = residency.kv is not None, residency.weights is not None
        self.weights_whole, self.weights = residency.weights_loaded, self._loaded

    def ended(self, ticket: int, record: Record, there: bool) -> None:
        """there: in the other engine, which has its first weights for ever."""
        if not there:
            self._arrivals.append((self._era, record.arrival))
        self._weights_at_end[ticket, record.child] = 0 if there else self._loaded

    def refused_late(self, count: int, there: bool) -> None:
        self._num_refused_late[self._era] += 0 if there else count

    # Judging

    def weights_of(self, ticket: int, record: Record) -> Callable[[int], int]:
        """By output index."""
        spans = record.weight_epochs
        assert bool(spans) == bool(record.token_ids)
        if not spans:
            return lambda index: self._weights_at_end[ticket, record.child]
        firsts = [first for first, _ in spans]
        assert firsts[0] == 0 and firsts == sorted({*firsts}) and firsts[-1] < len(record.token_ids)
        self.life.marks["results of several epochs"] += len(spans) > 1
        return lambda index: self._weights_of_epoch[spans[bisect_right(firsts, index) - 1][1]]

    def judge(self) -> None:
        """Arrivals are counted without a gap but for those refused late, anew after each reset."""
        assert len({*self._arrivals}) == len(self._arrivals)
        for era in range(self._era + 1):
            found = [at for e, at in self._arrivals if e == era]
            assert max(found, default=-1) < len(found) + self._num_refused_late[era]
