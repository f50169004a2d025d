"""How many steps a burst may have: what fits the time it may last, by how long steps of decoding took lately, and how
many rows those had.

- Whoever comes meanwhile, to submit or to abort, waits for its end. So it is short where anybody may want a token soon.
- A step is taken to last as much longer as it has more rows: it lasts less, as weights are read once for all of them.
- Nor is it longer than somebody is likely to go on: whoever waits for the last token of a call waits for its burst.
"""

from __future__ import annotations

from typing import Protocol

from perdure.api.plan import MOST_STEPS, StepPlan

SERVING_MS = 10
"""How long a burst lasts at most where not every request is of a closed call."""


class Requests(Protocol):
    """What is asked about all that runs; `core.Scheduler` is what answers."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def num_rows(self) -> int: ...

    def likely_steps(self) -> int: ...


class Pace:
    """max_burst_ms: how long a burst may last; 0 = there are none."""

    def __init__(self, max_burst_ms: float = 0) -> None:
        self._max_burst_ms = max_burst_ms
        self._step_s: float | None = None
        self._num_rows = 0.0

    def most_steps(self, requests: Requests) -> int:
        """Of the next burst, if there can be one; 1 until a step was measured."""
        if not self._max_burst_ms or self._step_s is None:
            return 1
        allowed = self._max_burst_ms if requests.is_closed else min(self._max_burst_ms, SERVING_MS)
        step_s = self._step_s * max(1.0, requests.num_rows / self._num_rows)
        fitting = min(MOST_STEPS, int(1e-3 * allowed / max(step_s, 1e-6)))
        return max(1, min(fitting, requests.likely_steps())) if fitting > 1 else 1

    def took(self, plan: StepPlan, seconds: float) -> None:
        """The device had this plan for so long."""
        if plan.tokens:
            return  # a prompt's step says nothing of others
        step_s, num_rows = seconds / plan.num_steps, len(plan.slot)
        if self._step_s is None:
            self._step_s, self._num_rows = step_s, num_rows
        self._step_s += (step_s - self._step_s) / 4
        self._num_rows += (num_rows - self._num_rows) / 4
