"""What the core asks of a device between steps, when none is in flight, and what came of it. Plain values, journalled.

- A directive that fails says whether it had changed anything; what has not changed goes on serving.
- Directives are done in the order they were given; each is known before the next is asked.
"""

from __future__ import annotations

import msgspec

from perdure.api.command import KVMode, WeightsMode
from perdure.api.event import Failure


class Sleep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give memory back until `Wake`. pages: those whose content is wanted again, ascending."""

    kv: KVMode
    weights: WeightsMode
    pages: list[int]


class Wake(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take memory again; pages: what of the pages copied out is still wanted. What is awake already stays as it is."""

    kv: bool
    weights: bool
    pages: list[int]


class Clear(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing of any request is needed any more."""


class LoadWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write the weights that were handed over under this ticket over those in use."""

    ticket: int


Directive = Sleep | Wake | Clear | LoadWeights


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """failure: why it was not done, None = done. changed: whether it had begun to change what it failed at.

    weights: the digest of those that were loaded (`Fingerprint.weights`).
    """

    failure: Failure | None = None
    changed: bool = False
    weights: str = ""
