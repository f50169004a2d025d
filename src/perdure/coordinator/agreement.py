"""`Agreement`: the state and the weights that hold at every replica that serves. Values in, values out.

- An order that took place says what holds from then on. What no order has said, replicas say: of weights the newest,
  which were agreed on by a coordinator before this one.
- Whoever joins is told `missing`: the orders that bring it into line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perdure.api import command as cmd
from perdure.coordinator.messages import About, Answer, Asked, EngineState


class Agreed(NamedTuple):
    """source: where the weights came from, None = nobody said yet. halt: the order that brought it to a state other
    than running."""

    state: EngineState = "running"
    weight_epoch: int = 0
    source: str | None = None
    halt: cmd.Pause | cmd.Suspend | None = None


class Agreement:
    """now: what holds."""

    def __init__(self) -> None:
        self.now = Agreed()
        self._has_state = self._has_weights = False
        """Whether an order that took place says what these are."""

    def took_place(self, order: Asked, source: str | None, done: Sequence[Answer]) -> None:
        """As the replicas say or, where there is none, as they would."""
        state, epoch, known, halt = self.now
        self._has_state |= isinstance(order, cmd.Pause | cmd.Suspend | cmd.Resume)
        self._has_weights |= isinstance(order, cmd.UpdateWeights)
        match order:
            case cmd.Pause() if state == "running":
                state, halt = "paused", order
            case cmd.Suspend() if state != "suspended":
                state, halt = "suspended", order
            case cmd.Resume(_, tags) if state != "suspended" or tags is None:
                state = "running"
            case cmd.UpdateWeights(_, number, has_weights):
                epoch = epoch + 1 if number is None else number
                known = source if has_weights else known
        # what is no order is answered while orders wait, and says nothing of what holds after them
        if isinstance(order, cmd.Order) and done and done[0].state != "stopped":
            epoch = done[0].weight_epoch
            # weights reach those, too, that no order reached that would have changed their state
            state = state if isinstance(order, cmd.UpdateWeights) else done[0].state
        self.now = Agreed(state, epoch, known, None if state == "running" else halt)

    def adopt(self, about: About, is_alone: bool) -> bool:
        """What this replica says, where nothing else does. Returns whether that is something new."""
        before = self.now
        is_first = before.source is None or is_alone
        if self._has_weights or not (is_first or about.weight_epoch > before.weight_epoch):
            return False
        halts: dict[str, cmd.Pause | cmd.Suspend] = {"paused": cmd.Pause(0), "suspended": cmd.Suspend(0)}
        self.now = Agreed(about.state, about.weight_epoch, about.source, halts.get(about.state))
        if self._has_state:
            self.now = self.now._replace(state=before.state, halt=before.halt)
        return True

    def missing(self, about: About) -> list[tuple[Asked, str | None]]:
        """Orders that bring a replica from its state into the agreed one. Tickets mean nothing here."""
        agreed, state = self.now, about.state
        orders: list[tuple[Asked, str | None]] = []
        other_weights = agreed.source is not None and about.source != agreed.source
        if other_weights and state == "suspended":
            orders.append((cmd.Resume(0, ["weights"]), None))
        if other_weights or about.weight_epoch != agreed.weight_epoch:
            source = agreed.source if other_weights else None
            orders.append((cmd.UpdateWeights(0, agreed.weight_epoch, other_weights), source))
        if state != agreed.state:
            if state != "running":
                orders.append((cmd.Resume(0), None))
            if agreed.halt is not None:
                orders.append((cmd.Pause(0) if isinstance(agreed.halt, cmd.Pause) else agreed.halt, None))
        return orders
