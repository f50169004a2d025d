"""Lives of a fleet: 4 replicas that die and return, 3 clients, a bad wire; each request one end, equal to its oracle.

`PERDURE_SIM_LIVES` sets how many: half of it, at most 20,000. A failure prints the seed and
the command that replays it.
"""

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.sim.fleet import run_fleets

BATCH = 50
MOST_FLEETS = 20_000

VISITED = (
    *(
        "killed",
        "hung",
        "left",
        "coordinator restarts",
        "connected anew",
        "client hung",
        "lost with requests",
        "went on in mid-stream",
    ),
    *(f"{reason} after {count} moves" for reason in ("stop", "length", "abort") for count in (0, 1)),
    *(
        "length after 2 moves",
        "children moved",
        "checkpoints with ended children",
        "checkpoints",
        "refused InvalidValue",
        "refused StateError",
    ),
    *(f"{order} done" for order in ("Pause", "Suspend", "Resume", "UpdateWeights", "GetStats")),
    *("PinPrefix done", "PinPrefix InvalidValue", "UnpinPrefix done", "pages told", "pages told gone"),
    *("pieces from a client", "pieces from a replica"),
    *("UpdateWeights ModelNotFound", "Reset StateError", "calls blocking", "calls by messages"),
)
"""What these lives must have met."""


def test_every_request_of_a_fleet_equals_its_oracle(sim_lives: int) -> None:
    count = min(sim_lives // 2, MOST_FLEETS)
    batches = [(first, min(BATCH, count - first)) for first in range(0, count, BATCH)]
    marks: Counter[str] = Counter()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        for found in pool.map(_run, batches):
            marks += found
    missed = [name for name in VISITED if not marks[name]]
    assert not missed, f"{count} fleets never met {missed}"
    print(f"{count} fleets, {dict(sorted(marks.items()))}")


def _run(batch: tuple[int, int]) -> Counter[str]:
    return run_fleets(*batch)
