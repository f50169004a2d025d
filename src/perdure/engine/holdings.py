"""`Holdings`: what a replica's prefix cache holds, as the coordinator is told of it.

- Changes are told together, a few times a second: what a request was sent for is known where it is routed.
- Messages are bounded; a new session is told all of it.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from perdure.coordinator.messages import Held
from perdure.core.prefix_report import ANEW

TELL_S = 0.2
MOST_NAMES = 4096
"""In one message: 40 KB."""


class Holdings:
    """changes: a `PrefixReport`'s."""

    def __init__(self, changes: deque[tuple[bytes, bool]]) -> None:
        self._changes = changes
        self._held: dict[bytes, None] = {}
        self._untold: dict[bytes, bool] = {}
        self._is_anew = True
        self._tell_at = 0.0

    def begin(self) -> None:
        """A session began: nobody there knows anything."""
        self._is_anew = True
        self._untold = dict.fromkeys(self._held, True)

    def messages(self, now: float) -> list[Held]:
        """What is to be told by now."""
        while self._changes:
            self._note(*self._changes.popleft())
        if now < self._tell_at or not (self._untold or self._is_anew):
            return []
        self._tell_at = now + TELL_S
        out = []
        names = iter(self._untold.items())
        while (some := list(islice(names, MOST_NAMES))) or self._is_anew:
            held, gone = [name for name, is_held in some if is_held], [name for name, is_held in some if not is_held]
            out.append(Held(self._is_anew, held, gone))
            self._is_anew = False
        self._untold = {}
        return out

    def _note(self, name: bytes, is_held: bool) -> None:
        if name == ANEW:
            self._held.clear()
            self._untold.clear()
            self._is_anew = True
            return
        self._untold[name] = is_held
        if is_held:
            self._held[name] = None
        else:
            self._held.pop(name, None)
