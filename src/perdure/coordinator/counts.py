"""`Counts`: what replicas have counted since start or `reset`, together. What one had counted stays when it is gone, as
far as it was ever told, so a sum never falls but by `reset`.

Replicas are named by their processes: one that is lost and calls again goes on counting where it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.api.output import Stats
from perdure.coordinator.membership import MOST_LOST

OF_NOW = ("num_pages", "num_free_pages", "num_pinned_pages", "num_running", "num_waiting", "num_paused")
SINCE_START = tuple(
    name for name in Stats.__struct_fields__ if name not in ("state", "weight_epoch", "paused_ids", *OF_NOW)
)


class Counts:
    def __init__(self) -> None:
        self._told: dict[str, Stats] = {}
        """The last word of every replica, also of some that are gone."""
        self._gone: dict[str, None] = {}
        self._of_others = dict.fromkeys(SINCE_START, 0)
        """Of those that are gone for so long that their names are forgotten."""

    def note(self, name: str, stats: Stats) -> None:
        self._told[name] = stats
        self._gone.pop(name, None)

    def leave(self, name: str) -> None:
        if name in self._told:
            self._gone[name] = None
        while len(self._gone) > MOST_LOST:
            first = next(iter(self._gone))
            last = self._told[first]
            self._forget(first)
            self._of_others = {count: value + getattr(last, count) for count, value in self._of_others.items()}

    def reset(self, name: str) -> None:
        """This one counts from 0."""
        self._forget(name)

    def reset_gone(self) -> None:
        for name in list(self._gone):
            self._forget(name)
        self._of_others = dict.fromkeys(SINCE_START, 0)

    def _forget(self, name: str) -> None:
        self._told.pop(name, None)
        self._gone.pop(name, None)

    def together(self, now: Sequence[Stats], state: str, weight_epoch: int) -> Stats:
        """All replicas as one engine. now: of those that serve."""
        counts = {name: sum(getattr(one, name) for one in now) for name in OF_NOW}
        for name, of_others in self._of_others.items():
            counts[name] = of_others + sum(getattr(one, name) for one in self._told.values())
        paused = [name for one in now for name in one.paused_ids]
        return Stats(state=state, weight_epoch=weight_epoch, paused_ids=paused, **counts)
