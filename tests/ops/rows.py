"""The check behind every invariant form: a row's bits depend on that row alone."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

COUNTS = (1, 2, 3, 7, 8, 9, 16, 31, 33, 64)
THREADS = (1, 2)


def assert_rows_independent(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """function(x)[a:b] has the same bits as function(x[a:b]), for runs of many lengths and starts, 1 and 2 threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(THREADS[0])
        whole = function(x)
        for threads in THREADS:
            torch.set_num_threads(threads)
            assert torch.equal(function(x), whole), f"{threads} threads change the whole"
            for start, stop in _runs(x.shape[0]):
                part = function(x[start:stop].clone())
                assert torch.equal(part, whole[start:stop]), f"rows {start}:{stop} alone differ, {threads} threads"
    finally:
        torch.set_num_threads(before)


def _runs(num_rows: int) -> Iterator[tuple[int, int]]:
    for count in COUNTS:
        for start in (0, 1, 5, num_rows - count):
            if start >= 0 and start + count <= num_rows:
                yield start, start + count
