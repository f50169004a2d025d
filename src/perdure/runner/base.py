"""What the loop needs of a device, whatever executes there.

- Steps run in the order of launch; `launch` returns before the step has run.
- A step's own failure is in its output (`StepOutput.errors`), never an exception of `wait`.
- A directive is done between steps, and its failure is in its outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from typing import Protocol

from perdure.api.directive import Directive, Outcome
from perdure.api.plan import DeviceRow, StepOutput, StepPlan


class Ticket(Protocol):
    """One launched step."""

    def wait(self) -> StepOutput:
        """Block until the step has run. May be called once or more, from any thread."""
        ...


class Device(Protocol):
    """Runs plans in order. threads: of its own, which end with `close`."""

    threads: tuple[Thread, ...]

    def launch(self, plan: StepPlan) -> Ticket:
        """Hand over a step and return at once."""
        ...

    def perform(self, directive: Directive) -> Outcome:
        """Do it, and return when it is done. No step is in flight."""
        ...

    def check(self, rows: Sequence[DeviceRow]) -> None:
        """Compare the device's rows with the core's account of them; no step is in flight. Raises AssertionError."""
        ...

    def close(self) -> None:
        """Finish what was launched and give everything back. Nothing is launched afterwards."""
        ...
