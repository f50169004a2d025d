"""Where a step's numbers lie."""

from __future__ import annotations

import numpy as np
import pytest

from perdure.runner.cuda.step import StepColumns, StepSize


@pytest.mark.parametrize(
    "size", [StepSize(0, 0, 0, 0), StepSize(1, 1, 0, 1), StepSize(7, 2, 3, 5), StepSize(513, 6, 9, 8)]
)
def test_every_column_begins_on_16_bytes_and_has_a_place_of_its_own(size):
    """A kernel is compiled for how its pointers are aligned: a step of another size must not compile it again."""
    words = np.zeros(size.num_words, np.int32)
    columns = StepColumns.on_host(words, size)
    found = [one for one in [*vars(columns).values(), *vars(columns.samples).values()] if isinstance(one, np.ndarray)]
    assert len(found) == 8 + 3 + 7 + 2
    begin = words.ctypes.data
    for column in found:
        assert (column.ctypes.data - begin) % 16 == 0
        column.reshape(-1).view(np.int32)[:] += 1
    assert words.max(initial=0) <= 1, "two columns share a word"
    lengths = [size.tokens] * 3 + [size.decodes] * 3 + [4 * size.blocks, size.samples] + [15 * size.samples]
    assert words.sum() == sum(lengths)
