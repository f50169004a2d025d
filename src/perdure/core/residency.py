"""What of the engine is asleep, and what may wake. Pure bookkeeping; `control` decides when.

- KV and weights sleep and wake apart; the engine runs when both are awake and the weights are whole.
- Weights that were dropped, or written in part, wake as memory only: they must be loaded before the KV wakes.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.api.command import KVMode, Tag, WeightsMode


class Residency:
    """kv, weights: how each sleeps, None = awake. weights_loaded: the memory of the weights holds one whole set."""

    def __init__(self) -> None:
        self.kv: KVMode | None = None
        self.weights: WeightsMode | None = None
        self.weights_loaded = True

    def copy(self) -> Residency:
        twin = Residency()
        twin.kv, twin.weights, twin.weights_loaded = self.kv, self.weights, self.weights_loaded
        return twin

    def sleep(self, kv: KVMode, weights: WeightsMode) -> None:
        self.kv = kv
        if weights != "keep":
            self.weights = weights
        if weights == "drop":
            self.weights_loaded = False

    def wake(self, kv: bool, weights: bool) -> None:
        if kv:
            self.kv = None
        if weights:
            self.weights = None

    def to_wake(self, tags: Sequence[Tag] | None) -> tuple[bool, bool]:
        """Whether the KV and the weights wake of those named."""
        return (
            self.kv is not None and (tags is None or "kv" in tags),
            self.weights is not None and (tags is None or "weights" in tags),
        )

    @property
    def is_whole(self) -> bool:
        """Whether the engine could run."""
        return self.kv is None and self.weights is None and self.weights_loaded

    def refusal(self, tags: Sequence[Tag] | None) -> str | None:
        """Why these cannot wake now."""
        if self.weights_loaded or (tags is not None and "kv" not in tags):
            return None
        return f"the weights are not whole: {self.remedy} first"

    @property
    def remedy(self) -> str:
        """What brings it back, for messages."""
        if self.weights_loaded:
            return "resume()"
        return "update_weights()" if self.weights is None else "resume(tags=['weights']) and update_weights()"
