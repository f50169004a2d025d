"""`ThreadedRunner`: executes plans in order on a thread of its own, so that planning overlaps with computing.

- `launch` returns at once; a ticket is done when its step has run.
- A step that raises becomes an output in which every row of that step failed; later steps go on, without these rows.
- What is no `Exception` (an exit, an interrupt) ends the thread; that step and every later one raise it to who waits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

from perdure.api.directive import Directive, Outcome
from perdure.api.ending import Failure
from perdure.api.plan import DeviceRow, StepOutput, StepPlan
from perdure.runner.failed_rows import failed_output
from perdure.runner.runner import Runner


class StepTicket:
    """One launched step (`perdure.runner.base.Ticket`). The worker alone fills it, once."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._output: StepOutput | BaseException | None = None

    def fill(self, output: StepOutput | BaseException) -> None:
        self._output = output
        self._done.set()

    def wait(self) -> StepOutput:
        """Raises RuntimeError if the thread that should have run the step is gone."""
        self._done.wait()
        assert self._output is not None
        if isinstance(self._output, BaseException):
            raise RuntimeError(f"the runner's thread ended with {self._output!r}") from self._output
        return self._output


class ThreadedRunner:
    """A `perdure.runner.base.Device` over a `Runner`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._steps: SimpleQueue[tuple[StepPlan, StepTicket] | None] = SimpleQueue()
        self._closed = False
        self.thread = threading.Thread(target=self._work, name="perdure-runner", daemon=True)
        self.threads: tuple[threading.Thread, ...] = (self.thread,)
        self.thread.start()

    def launch(self, plan: StepPlan) -> StepTicket:
        assert not self._closed, "launched after close"
        ticket = StepTicket()
        self._steps.put((plan, ticket))
        return ticket

    def check(self, rows: Sequence[DeviceRow]) -> None:
        self._runner.check(rows)

    def perform(self, directive: Directive) -> Outcome:
        """On the caller's thread: with no step in flight the runner is nobody else's."""
        try:
            return Outcome(weights=self._runner.perform(directive))
        except Exception as error:
            return self._runner.memory.failed(error)

    def close(self) -> None:
        """Run what was launched, then end the thread. Closing twice is closing once."""
        if not self._closed:
            self._closed = True
            self._steps.put(None)
            self.thread.join()

    def _work(self) -> None:
        ended: BaseException | None = None
        while (step := self._steps.get()) is not None:
            plan, ticket = step
            try:
                ticket.fill(self._execute(plan) if ended is None else ended)
            except BaseException as error:
                ended = error
                ticket.fill(error)

    def _execute(self, plan: StepPlan) -> StepOutput:
        try:
            return self._runner.execute(plan)
        except Exception as error:
            why = Failure.of_step(error)
            self._runner.fail(plan.slot, why)
            return failed_output(plan, why)
