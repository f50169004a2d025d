"""Who is put aside when pages run out. Pure; the scheduler carries it out.

- Residents are served in order (priority, arrival). One that finds no page may pause, keeping its pages, while others
  run on towards their end, but paused requests may keep at most `paused_pages` together.
- Otherwise the last resident in the order is evicted: it loses its pages and is computed again later. Somebody always
  runs, and the first in the order is never evicted for another, so every request ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.core.lifecycle import Status
from perdure.core.state import RequestState


def may_pause(state: RequestState, residents: Sequence[RequestState], paused_pages: int) -> bool:
    """Whether this one may wait for a page with its pages kept."""
    held = len(state.pages)
    someone_runs = False
    for other in residents:
        if other is state:
            continue
        if other.status is Status.PAUSED:
            held += len(other.pages)
        else:
            someone_runs = True
    return someone_runs and held <= paused_pages


def victim(residents: Sequence[RequestState]) -> RequestState:
    """The one to evict: the last in the order."""
    return residents[-1]


def may_return(num_free: int, num_needed: int, num_residents: int, num_evictions: int) -> bool:
    """Whether a waiting request's pages fit now. One that was evicted before also leaves each resident a page to grow
    into, or it would be thrown out again after a few tokens."""
    return num_needed + (num_residents if num_evictions else 0) <= num_free
