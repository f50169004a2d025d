"""Where a step's numbers lie."""

from __future__ import annotations

import numpy as np
import pytest

from perdure.runner.cuda.step import StepColumns, StepSize
from perdure.runner.shapes import ShapeRules, shapes


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


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_a_shape_has_blocks_for_whatever_prompts_it_takes(block_size):
    """One prompt of all its tokens; as many as it has rows for, of one token over whole blocks each."""
    for shape in shapes(ShapeRules(512, 4096, 512, -1, "hybrid", 512, 4)):
        room = StepSize.of(shape, block_size).blocks
        if not shape.num_prompts:
            assert room == 0
            continue
        assert -(-shape.num_tokens // block_size) <= room, shape
        left, blocks = shape.num_tokens - shape.num_prompts, shape.num_prompts
        assert left < 0 or left // block_size + blocks <= room, shape
