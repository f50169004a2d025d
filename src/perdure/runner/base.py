"""What the engine loop needs of a device: launch a plan, wait for its output, close. No torch here."""

from __future__ import annotations

from typing import Protocol

from perdure.api.plan import StepOutput, StepPlan


class Ticket(Protocol):
    """One launched step."""

    def wait(self) -> StepOutput:
        """The step's output, once it is there."""


class Device(Protocol):
    """Executes plans in the order they were launched."""

    def launch(self, plan: StepPlan) -> Ticket:
        """Take the plan and return at once."""

    def close(self) -> None:
        """Finish what was launched and give everything back."""
