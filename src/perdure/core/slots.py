"""Stable device rows. A request keeps its slot until it ends or is evicted; slots are never moved or compacted."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class Slots:
    """The free ones, lowest first, so that equal runs give equal slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        heapify(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return heappop(self._free)

    def release(self, slot: int) -> None:
        assert 0 <= slot < self.num_slots and slot not in self._free, slot
        heappush(self._free, slot)
