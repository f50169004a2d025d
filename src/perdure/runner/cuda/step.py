"""One step's numbers in one block of memory: written on the host, copied at once, read where they land.

- The layout follows from the step's physical size alone, so a graph captured for a size finds every column at its place
  whatever the step. Every column begins on 16 bytes (`sample_columns`).
- What pads a step is written here: tokens that write nowhere, rows that stand nowhere, blocks without queries, draws
  into a slot that nobody has.

Shapes: T tokens, D rows of one query, B blocks of prompts, S rows to sample, all physical.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.runner.cuda.sample_columns import SampleColumns, aligned, num_sample_words
from perdure.runner.inputs import Ints, PackedStep
from perdure.runner.shapes import Shape

NOWHERE = -1


@dataclass(frozen=True, slots=True, order=True)
class StepSize:
    """Physical numbers of tokens, rows of one query, blocks of prompts, rows to sample."""

    tokens: int
    decodes: int
    blocks: int
    samples: int

    @staticmethod
    def of(shape: Shape, block_size: int) -> StepSize:
        """Room for every step that is padded to the shape. Every row of it may be sampled. Prompts may take tokens that
        rows which decode leave, and the last block of each may be a short one."""
        blocks = shape.num_tokens // block_size + shape.num_prompts if shape.num_prompts else 0
        return StepSize(shape.num_tokens, shape.num_decodes, blocks, shape.num_rows)

    @property
    def num_words(self) -> int:
        """Of four bytes."""
        own = 3 * aligned(self.tokens) + 3 * aligned(self.decodes) + 4 * self.blocks + aligned(self.samples)
        return own + num_sample_words(self.samples)


class StepColumns:
    """The columns of a step over a flat block of 32-bit words, a numpy array or a tensor.

    tokens [T]: ids, or ~slot where the token sampled last into that slot stands. positions [T]. write [T]: page *
    page_size + offset. index, slots, at [D] and blocks [B, 4]: as in `PagedRows`. hidden [S]: the row of each one's
    logits. samples: what is drawn of them.
    """

    def __init__(self, flat: Any, size: StepSize, samples: SampleColumns) -> None:
        self.size = size
        self.samples = samples
        end = num_sample_words(size.samples)

        def part(count: int) -> Any:
            nonlocal end
            begin, end = end, end + aligned(count)
            return flat[begin : begin + count]

        self.tokens, self.positions, self.write = (part(size.tokens) for _ in range(3))
        self.index, self.slots, self.at = (part(size.decodes) for _ in range(3))
        self.blocks = part(4 * size.blocks).reshape(size.blocks, 4)
        self.hidden = part(size.samples)

    @staticmethod
    def on_host(words: NDArray[np.int32], size: StepSize) -> StepColumns:
        return StepColumns(words, size, SampleColumns.on_host(words, size.samples))

    @staticmethod
    def on_device(words: torch.Tensor, size: StepSize) -> StepColumns:
        return StepColumns(words, size, SampleColumns.on_device(words, size.samples))

    def pad(self, nobody: int) -> None:
        """A step without rows. nobody: the slot that tokens of padding are drawn into."""
        self.tokens[:] = 0
        self.positions[:] = 0
        self.write[:] = NOWHERE
        self.index[:] = 0
        self.slots[:] = 0
        self.at[:] = NOWHERE
        self.blocks[:] = 0
        self.hidden[:] = 0
        self.samples.pad(nobody)

    def fill(self, step: PackedStep, ones: Ints, blocks: Ints, sampled: Ints) -> None:
        """Write a step over padding, but for its samples. ones: its rows of one query that go the way of such; blocks:
        of the others. sampled: indices into step.sampled of the rows whose logits are wanted here."""
        num_tokens = int(step.offsets[-1])
        self.tokens[:num_tokens] = step.token_ids[:num_tokens]
        self.tokens[step.offsets[:-1][step.on_device]] = ~step.slots[step.on_device]
        self.positions[:num_tokens] = step.positions[:num_tokens]
        self.write[:num_tokens] = step.kv_slots
        count = len(ones)
        self.index[:count] = step.offsets[ones]
        self.slots[:count] = step.slots[ones]
        self.at[:count] = step.starts[ones]
        self.blocks[: len(blocks)] = blocks
        self.hidden[: len(sampled)] = step.sampled_hidden[sampled]


def longest_first(step: PackedStep, rows: Ints) -> Ints:
    """Of rows of one query: those that take longest begin first."""
    ordered: Ints = rows[np.argsort(-step.starts[rows], kind="stable")]
    return ordered


def blocks_of(step: PackedStep, rows: Ints, block_size: int) -> Ints:
    """The blocks [b, 4] of these rows, those with the longest past first: they take longest."""
    if not len(rows):
        return np.empty((0, 4), np.int64)
    lengths = step.offsets[rows + 1] - step.offsets[rows]
    counts = -(-lengths // block_size)
    of = np.repeat(np.arange(len(rows)), counts)
    low = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_size
    row = rows[of]
    blocks = np.stack(
        (step.slots[row], step.offsets[row] + low, step.starts[row] + low, np.minimum(block_size, lengths[of] - low)), 1
    )
    found: Ints = blocks[np.argsort(-blocks[:, 2], kind="stable")]
    return found
