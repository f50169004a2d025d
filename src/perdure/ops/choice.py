"""Which form of product serves a weight of a given shape on this machine: measured once, kept, and never by a hair.

- The compiled kernels are the rule. oneDNN's packed product takes a shape only where it is faster by `MARGIN` over all
  numbers of rows measured, far beyond the noise of a busy machine: bits differ between the two forms, and should not
  differ between two starts.
- Both give a row the same bits in any company, so the choice moves speed alone.
- What was settled is kept beside the kernels, by their version, torch's and the number of threads: also that a shape is
  the kernels' because there was no time left to measure it, or the next start would choose anew.

Shapes: a weight is [n, k].
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from perdure.ops.linear import can_pack, packed
from perdure.ops.native import Library
from perdure.ops.native.weights import packed_floats

ROWS = (1, 16, 256)
MARGIN = 1.5
MOST_OUTPUTS = 2048  # of a weight as measured: what comes after looks the same to a product
REPEATS = 5
SECONDS = 1.5  # for all shapes together; those left then are the kernels', for good

Shape = tuple[int, ...]
Ratios = tuple[float, ...]
"""Time of oneDNN's product over that of the compiled kernels, for each of `ROWS`; none where it was not measured."""


class Choice:
    """The form of each shape that was asked for."""

    def __init__(self, ratios: dict[Shape, Ratios]) -> None:
        self.ratios = ratios

    def is_packed(self, shape: Shape) -> bool:
        """Whether oneDNN's product serves this shape."""
        ratios = self.ratios.get(shape, ())
        return bool(ratios) and math.prod(ratios) ** (1 / len(ratios)) * MARGIN < 1

    def describe(self) -> dict[str, str]:
        """For people: each shape, what serves it, and how it compares."""
        return {" x ".join(map(str, shape)): self._words(shape, ratios) for shape, ratios in self.ratios.items()}

    def _words(self, shape: Shape, ratios: Ratios) -> str:
        if not ratios:
            return "native (no time was left to measure it)"
        compared = ", ".join(f"{ratio:.2f} at {rows}" for ratio, rows in zip(ratios, ROWS, strict=True))
        return f"{'packed' if self.is_packed(shape) else 'native'} (times packed's speed, by rows: {compared})"


def choose(library: Library, shapes: Iterable[Shape], measure: Callable[[Shape], Ratios] | None = None) -> Choice:
    """The choice for these shapes, measured where none is settled yet. What another process settled meanwhile holds."""
    if not can_pack(torch.device("cpu"), torch.float32):
        return Choice({})
    path = library.folder / f"products-{_key(library)}.json"
    known = _read(path)
    wanted = list(dict.fromkeys(shapes))
    deadline = time.monotonic() + SECONDS
    measured = {}
    for shape in wanted:
        if shape not in known:
            in_time = time.monotonic() < deadline
            ratios = (_measure(library, shape) if measure is None else measure(shape)) if in_time else ()
            measured[shape] = tuple(round(ratio, 3) for ratio in ratios)
    if measured:
        known = {**measured, **_read(path)}
        _write(path, known)
    return Choice({shape: known[shape] for shape in wanted})


def _measure(library: Library, shape: Shape) -> Ratios:
    n, k = shape
    n = min(n, MOST_OUTPUTS)
    w = torch.empty(n, k).normal_(generator=torch.Generator().manual_seed(0))
    theirs, ours = packed(w), packed_floats(library, w)
    ratios = []
    for rows in ROWS:
        x = torch.ones(rows, k)
        pairs = [(_seconds(partial(ours.multiply, x, None)), _seconds(partial(theirs, x))) for _ in range(REPEATS)]
        ratios.append(min(their for _, their in pairs) / min(our for our, _ in pairs))
    return tuple(ratios)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _key(library: Library) -> str:
    parts = (library.version, torch.__version__, torch.get_num_threads(), ROWS, MOST_OUTPUTS)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[Shape, Ratios]:
    try:
        entries = json.loads(path.read_text())
        found = {(int(n), int(k)): tuple(float(ratio) for ratio in ratios) for n, k, ratios in entries}
    except (OSError, ValueError, TypeError):
        return {}  # none yet, or damaged: it is measured again
    return {shape: ratios for shape, ratios in found.items() if len(ratios) in (0, len(ROWS))}


def _write(path: Path, ratios: dict[Shape, Ratios]) -> None:
    made = path.with_suffix(f".{os.getpid()}")
    try:
        made.write_text(json.dumps([[*shape, list(values)] for shape, values in ratios.items()]))
        os.replace(made, path)
    except OSError:
        made.unlink(missing_ok=True)
