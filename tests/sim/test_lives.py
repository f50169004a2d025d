"""Thousands of random lives at each depth, each request equal to its one-request oracle.

`PERDURE_SIM_LIVES` sets how many (the soak: 50,000 a depth). A failure prints the seed and the command that replays it.
"""

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.sim.life import run_lives

BATCH = 125

EVERYWHERE = (
    *(f"checkpoint while {status}" for status in ("waiting", "running", "paused")),
    *(f"{reason} after {count} checkpoints" for reason in ("stop", "length") for count in (1, 2)),
    "refused while held",
    *("bursts", "longest bursts", "stop in a burst", "length in a burst", "error in a burst"),
)
"""What the lives of every depth must have visited."""

RARE = {
    1: ("evictions", "pauses", "cached tokens", "refused", "length", "stop by NoneType", "stop by int", "stop by str"),
    2: ("stop while paused", "stop while waiting", "length while waiting", "error while running", "stop by tuple"),
    3: ("stop while paused", "stop while waiting", "length while waiting", "evictions", "pauses"),
    4: ("stop while paused", "stop while waiting", "length while waiting", "evictions", "pauses"),
}
"""And what those of one depth must."""

ORDERS = (
    *("suspended by persist", "suspended by offload", "suspended by recompute", "Suspend failed", "Suspend refused"),
    *("Resume done", "Resume refused", "Resume failed", "Reset done", "Reset refused"),
    *("checkpoint while suspended", "went on here", "went on elsewhere", "cached tokens", "storms"),
    *("taken in before a prompt that goes on", "prompts before rows that decode"),
    *("copies", "children: stop", "children: length", "children: error", "checkpoints with ended children"),
    *("waits for a prefix", "prompt scores that came with pages", "pins", "pins refused", "pinned pages"),
    *("UpdateWeights done", "UpdateWeights refused", "UpdateWeights failed", "results of several epochs", "inexact"),
)
"""What they must have visited at every depth."""


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_every_life_equals_its_oracle(depth: int, sim_lives: int) -> None:
    batches = [(first, min(BATCH, sim_lives - first), depth) for first in range(0, sim_lives, BATCH)]
    marks: Counter[str] = Counter()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        for found in pool.map(_run, batches):
            marks += found
    missed = [name for name in (*EVERYWHERE, *RARE[depth], *ORDERS) if not marks[name]]
    assert not missed, f"{sim_lives} lives never visited {missed}"
    print(f"depth {depth}: {sim_lives} lives, {dict(sorted(marks.items()))}")


def _run(batch: tuple[int, int, int]) -> Counter[str]:
    return run_lives(*batch)
