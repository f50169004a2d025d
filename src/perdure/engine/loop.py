"""The one loop. `steps_in_flight` makes it synchronous (1) or overlapped (2 and more); nothing else does.

- Each plan may be a burst, of as many steps as `pace` allows.
- It runs on a thread of its own; callers cross only by `Inbox` and `publish`.
- A fault outside a step's own rows ends `run` with it; its owner tells whoever waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from perdure.api.command import Command
from perdure.api.event import Event
from perdure.api.plan import StepPlan
from perdure.core.journal import Journal
from perdure.core.scheduler import Scheduler
from perdure.engine.pace import Pace
from perdure.runner.base import Device, Ticket

log = logging.getLogger("perdure")


class Inbox:
    """Commands from any thread, in order. is_waited_on: whether whoever takes waits for one, or to be let go on."""

    def __init__(self) -> None:
        self.is_waited_on = False
        self._commands: deque[Command] = deque()
        self._arrived = threading.Condition()
        self._is_held = False

    def hold(self, holds: bool) -> None:
        """While held, whoever takes waits, whatever there is."""
        with self._arrived:
            self._is_held = holds
            self._arrived.notify()

    @property
    def waiting(self) -> list[Command]:
        """What was put and not taken yet."""
        with self._arrived:
            return list(self._commands)

    def put(self, *commands: Command) -> None:
        """All of these with nothing in between."""
        with self._arrived:
            self._commands.extend(commands)
            self._arrived.notify()

    def take(self, block: bool) -> list[Command]:
        """All that arrived; waits for one if asked to."""
        with self._arrived:
            while self._is_held or (block and not self._commands):
                self.is_waited_on = True
                self._arrived.wait()
            self.is_waited_on = False
            taken = list(self._commands)
            self._commands.clear()
        return taken


class Loop:
    """publish(events, time) is called on the loop's thread. check: verify all books after every turn, the owner's
    (`audit`) with them; without it they are looked at whenever there is nothing to do, and what is wrong is logged.

    clock: the one clock of all that is told; journal entries carry its times too. pace: how many steps a burst may
    have; by default there are none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        inbox: Inbox,
        publish: Callable[[list[Event], float], None],
        *,
        steps_in_flight: int,
        journal: Journal | None = None,
        check: bool = False,
        audit: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        pace: Pace | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.steps_in_flight = steps_in_flight
        self.pace = pace or Pace()
        self._device = device
        self._inbox = inbox
        self._publish = publish
        self._journal = journal
        self._check = check
        self._audit = audit
        self._clock = clock
        self._has_warned = False
        self._in_flight: deque[tuple[StepPlan, Ticket, float]] = deque()
        """With the time of its launch."""
        self._free_at = 0.0
        """When the device had done all that was committed."""

    @property
    def is_done(self) -> bool:
        return self.scheduler.is_stopped and not self._in_flight

    def run(self) -> None:
        """Turn until stopped and drained."""
        while not self.is_done:
            self.turn(block=True)

    def close(self) -> None:
        """Let the device finish what was launched, and close the journal."""
        self._device.close()
        self._record(Journal.close)

    def _record(self, write: Callable[..., None], *what: object) -> None:
        """A journal that cannot be written, because the disk is full say, ends; the engine goes on."""
        if self._journal is None:
            return
        journal, self._journal = self._journal, None
        try:
            write(journal, *what)
        except OSError as error:
            log.error("the journal ends here, it cannot be written: %s", error)
            with suppress(OSError):
                journal.close()
        else:
            self._journal = journal

    def turn(self, block: bool) -> None:
        """Apply what arrived, keep the device busy, commit the oldest step or, between steps, have a directive done.
        block: sleep if there is nothing to do."""
        idle = not (self._in_flight or self.scheduler.can_act or self.scheduler.directive())
        if idle:
            self._check_idle()
        self._apply_arrived(block and idle)
        self._launch()
        if self._in_flight:
            plan, ticket, launched_at = self._in_flight.popleft()
            output = ticket.wait()
            self._apply_arrived(block=False)  # an abort that came while the step ran goes before its output
            now = self._clock()
            self.pace.took(plan, now - max(launched_at, self._free_at))
            self._free_at = now
            self._record(Journal.committed, output, now)
            self._tell(self.scheduler.commit(plan, output), now)
        elif directive := self.scheduler.directive():
            outcome = self._device.perform(directive)
            now = self._clock()
            self._record(Journal.performed, directive, outcome, now)
            self._tell(self.scheduler.done(directive, outcome), now)
        else:
            assert not self.scheduler.can_act, "requests wait, nothing is in flight, and no step can be planned"
        if self._check:
            self.check()

    def check(self) -> None:
        """Every page, row, record and waiter is accounted for. Raises AssertionError."""
        self.scheduler.check()
        if not self._in_flight:
            self._device.check(self.scheduler.device_rows())
        self._audit()

    def _check_idle(self) -> None:
        """A leak is no reason to stop serving, but whoever runs this should know."""
        try:
            self.scheduler.check_idle()
        except AssertionError as error:
            if not self._has_warned:
                log.error("the books are wrong: %s; check_integrity=True finds where it begins", error)
            self._has_warned = True

    def _apply_arrived(self, block: bool) -> None:
        for command in self._inbox.take(block):
            now = self._clock()
            self._record(Journal.applied, command, now)
            self._tell(self.scheduler.apply(command), now)

    def _launch(self) -> None:
        while len(self._in_flight) < self.steps_in_flight:
            plan = self.scheduler.plan(self.pace.most_steps(self.scheduler))
            now = self._clock()
            self._record(Journal.launched, plan, now)
            self._tell(self.scheduler.told(), now)
            if plan is None:
                return
            self._in_flight.append((plan, self._device.launch(plan), now))

    def _tell(self, events: list[Event], now: float) -> None:
        if self._journal is not None:
            self._record(Journal.told, events, self.scheduler.stats(), now)
        if events:
            self._publish(events, now)
