"""What directives ask of a device's memory: give it back, take it again, other weights. The same for every device."""

from __future__ import annotations

from perdure.api.directive import Clear, Directive, LoadWeights, Outcome, Sleep, Wake
from perdure.api.ending import Failure
from perdure.api.errors import DeviceError, PerdureError, described
from perdure.models.store import Store
from perdure.models.weight_set import WeightSet
from perdure.runner.kv_store import KVStore


class Memory:
    """weights: None = there are none, and no directive is about them.

    staged: weights to be loaded, by the ticket of their update: checked, and put here before it is sent.
    """

    def __init__(self, kv: KVStore, weights: WeightSet | None) -> None:
        self._kv = kv
        self._weights = weights
        self.staged: dict[int, Store] = {}

    @property
    def has_whole_weights(self) -> bool:
        """False after a load that failed when it had begun."""
        return self._weights is None or self._weights.is_whole

    def failed(self, error: Exception) -> Outcome:
        """What to say of a directive that raised this."""
        known = error if isinstance(error, PerdureError) else DeviceError(described(error))
        return Outcome(Failure.of(known), changed=not self.has_whole_weights)

    def perform(self, directive: Directive) -> str:
        """Between steps. Raises where it cannot. Returns the digest of the weights that it loaded, if it did."""
        match directive:
            case Sleep():
                self._sleep(directive)
            case Wake(kv, weights, pages):
                if weights:
                    assert self._weights is not None
                    self._weights.take_back()
                if kv:
                    self._kv.restore(pages)
            case Clear():
                self._kv.begin_anew()
            case LoadWeights(ticket):
                assert self._weights is not None
                self._weights.load(self.staged.pop(ticket))
                return self._weights.digest
        return ""

    def _sleep(self, directive: Sleep) -> None:
        """First what may fail, then what cannot."""
        if directive.weights == "offload":
            assert self._weights is not None
            self._weights.save()
        try:
            if directive.kv == "offload":
                self._kv.offload(directive.pages)
        except BaseException:
            if directive.weights == "offload" and self._weights is not None:
                self._weights.forget_saved()
            raise
        if directive.kv == "recompute":
            self._kv.release()
        if directive.weights != "keep":
            assert self._weights is not None
            self._weights.give_back()
