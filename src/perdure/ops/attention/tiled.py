"""The default form: gathered pages, whole score rows, values summed tile by tile. Batch invariant on a CPU.

A query's output bits depend on its own keys and position only: not on the chunk it came in, on other rows, or on being
a decode step or part of a prompt. Why (each point is tested; the first two were measured for MKL, 1 and 2 threads):
- A dot product over D has one order of sums whatever the numbers of queries and keys, if both are multiples of 8.
  Queries are padded to that, the heads of a group are queries, and keys come in whole tiles.
- softmax sums a row in lanes, so keys appended with weight 0 change nothing, nor does a whole number of lanes before.
- Values are summed over tiles at absolute positions, one product of fixed depth a tile, in order. (One product over all
  keys would not do: MKL splits a depth by its size, and appended zeros then move bits; seen between 192 and 256.)
- What a query must not see (later positions, cleared ones, those its window has left, a filler page) has weight exactly
  0 and finite values. The filler is the first page gathered for the row, so one row's NaN cannot reach another.
- Sinks are one lane of LANES keys before all others. The rest of those has weight 0, and no values are summed of them.
- Tiles that a window has left behind for all queries at hand are not even gathered: their sums would be exactly 0.
The number of threads is part of the bits, as is the library.

Shapes: as in `base`; B rows handled together, Q = query rows (positions times G, padded to 8), C = keys (whole tiles).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.ops.activation import soft_cap_
from perdure.ops.attention.base import AttentionRows, CacheShape, LayerAttention

QUERY_ALIGNMENT = 8
LANES = 16  # of a softmax, at most; masks, too, begin and end at cache lines of so many
MIN_TILE = 64  # positions; 128 saves a product here and there, and reads more past the end
GATHER_BYTES = 8 << 20  # keys and values gathered at once for decode rows: stays in the outer cache
PROMPT_BLOCK = 64  # positions of a prompt scored at once: more would score more that the mask then hides
SCORE_BYTES = 8 << 20  # scores of one block: over a long past it holds fewer positions
RAGGED = 0.75  # decode rows share a gather if the shorter needs at least this part of the longer


def _ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _mask(hidden: NDArray[np.bool_]) -> torch.Tensor:
    """What is added to scores of rows by keys, to be broadcast over a group's heads: [rows, 1, keys], 0 or -inf."""
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0.0))[:, None, :])


class TiledAttention:
    """See the module's docstring. Holds scratch memory, so one step runs at a time."""

    name = "tiled"
    batch_invariant = True

    def __init__(self, shape: CacheShape, layer: LayerAttention) -> None:
        self._shape = shape
        self._layer = layer
        # Whole pages, and whole lanes of keys whatever the page size.
        self.tile = _ceil_to(MIN_TILE, math.lcm(shape.page_size, LANES))
        self.kernel = f"tiled by {self.tile}"
        self._scratch = _Scratch()

    def plan(self, rows: AttentionRows) -> PlannedTiled:
        lengths = np.diff(rows.offsets)
        first_tile = self._layer.first_visible(rows.starts) // self.tile
        num_tiles = -(-(rows.starts + lengths) // self.tile) - first_tile
        first_key = first_tile * self.tile
        batches = self._decode_batches(lengths, num_tiles)
        decode = [self._plan_decode(rows, first_key, int(num_tiles[batch].max()), batch) for batch in batches]
        prompts = [
            self._plan_prompt(rows, first_key, int(num_tiles[row]), row) for row in np.flatnonzero(lengths > 1).tolist()
        ]
        num_queries = int(rows.offsets[-1])
        return PlannedTiled(self._shape, self._layer, self.tile, self._scratch, num_queries, decode, prompts)

    def _decode_batches(self, lengths: NDArray[np.int64], num_tiles: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Rows of one query, longest first, cut where a batch would be too ragged or too large."""
        ones = np.flatnonzero(lengths == 1)
        order = ones[np.argsort(-num_tiles[ones], kind="stable")]
        tile_bytes = 2 * self._shape.num_kv_heads * self.tile * self._shape.head_dim * 4
        batches: list[NDArray[np.int64]] = []
        while len(order):
            longest = int(num_tiles[order[0]])
            fit = max(1, GATHER_BYTES // (tile_bytes * longest))
            alike = int(np.count_nonzero(num_tiles[order] >= RAGGED * longest))
            batches.append(np.sort(order[: min(fit, alike)]))  # in packed order, often a plain range
            order = order[min(fit, alike) :]
        return batches

    def _plan_decode(
        self, rows: AttentionRows, first_key: NDArray[np.int64], num_tiles: int, batch: NDArray[np.int64]
    ) -> _Decode:
        num_keys = num_tiles * self.tile
        keys, start, position = np.arange(num_keys), first_key[batch, None], rows.starts[batch, None]
        hidden = keys > position - start
        if self._layer.window is not None:
            hidden |= keys < self._layer.first_visible(position) - start
        queries = rows.offsets[batch]
        first, last = int(queries[0]), int(queries[-1])
        return _Decode(
            num_rows=len(batch),
            queries=slice(first, last + 1) if last - first == len(batch) - 1 else torch.from_numpy(queries),
            num_keys=num_keys,
            gather=self._gather(rows, batch, first_key[batch], rows.starts[batch] + 1, num_keys),
            mask=_mask(hidden),
        )

    def _plan_prompt(self, rows: AttentionRows, first_key: NDArray[np.int64], num_tiles: int, row: int) -> _Prompt:
        first, last = int(rows.offsets[row]), int(rows.offsets[row + 1])
        start, num_keys = int(rows.starts[row]), num_tiles * self.tile
        window = self._layer.window
        most_keys = (
            num_keys if window is None else min(num_keys, _ceil_to(window + PROMPT_BLOCK, self.tile) + self.tile)
        )
        budget = SCORE_BYTES // (4 * self._shape.num_heads * most_keys)
        step = min(PROMPT_BLOCK, max(QUERY_ALIGNMENT, budget // QUERY_ALIGNMENT * QUERY_ALIGNMENT))
        lows = range(0, last - first, step)
        blocks = [self._plan_block(start, int(first_key[row]), low, min(low + step, last - first)) for low in lows]
        batch = np.array([row])
        gather = self._gather(rows, batch, first_key[batch], np.array([start + last - first]), num_keys)
        return _Prompt(first, last, num_keys, gather, blocks)

    def _plan_block(self, start: int, first_key: int, low: int, high: int) -> _Block:
        """Queries low .. high - 1 of a row that starts at `start` and whose gathered keys begin at first_key."""
        position = np.arange(start + low, start + high)
        visible = self._layer.first_visible(position)
        first = int(visible[0]) // self.tile * self.tile
        end = _ceil_to(start + high, self.tile)
        # From the first position that some query must not see yet, and up to the last that some query sees no more.
        masked_from = (start + low + 1) // LANES * LANES
        masked_to = min(_ceil_to(int(visible[-1]), LANES), end)
        masks = [(slice(masked_from - first, end - first), _mask(np.arange(masked_from, end) > position[:, None]))]
        if masked_to > first:
            masks.append((slice(0, masked_to - first), _mask(np.arange(first, masked_to) < visible[:, None])))
        return _Block(low, high, slice(first - first_key, end - first_key), masks)

    def _gather(
        self,
        rows: AttentionRows,
        batch: NDArray[np.int64],
        first_key: NDArray[np.int64],
        known: NDArray[np.int64],
        num_keys: int,
    ) -> torch.Tensor:
        """Rows of the cache seen as [2 * Hkv * P, page_size * D] that make keys and values [2, Hkv, B, C, D]: the C
        from first_key on, of which those before `known` are there."""
        shape = self._shape
        at = first_key[:, None] // shape.page_size + np.arange(num_keys // shape.page_size)
        at = np.where(at < -(-known[:, None] // shape.page_size), at, at[:, :1])
        pages = rows.block_table[batch[:, None], at]
        heads = np.arange(2 * shape.num_kv_heads, dtype=np.int64) * shape.num_pages
        return torch.from_numpy((heads[:, None, None] + pages).reshape(-1))


@dataclass(frozen=True, slots=True)
class _Decode:
    """B rows of one query each."""

    num_rows: int
    queries: torch.Tensor | slice  # [B] where they are packed
    num_keys: int
    gather: torch.Tensor
    mask: torch.Tensor  # [B, 1, C] 0 or -inf


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries low .. high - 1 of a prompt row, over a range of its gathered keys; a mask is for a range of those."""

    low: int
    high: int
    keys: slice
    masks: list[tuple[slice, torch.Tensor]]  # each [high - low, 1, masked keys] 0 or -inf


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One row of several queries, packed at first : last."""

    first: int
    last: int
    num_keys: int
    gather: torch.Tensor
    blocks: list[_Block]


@dataclass(frozen=True, slots=True)
class PlannedTiled:
    """A step's batches of decode rows and its prompt rows."""

    shape: CacheShape
    layer: LayerAttention
    tile: int
    scratch: _Scratch
    num_queries: int  # what comes after them in q is padding
    decode: list[_Decode]
    prompts: list[_Prompt]

    def run(self, q: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert (sinks is None) == (self.layer.sink is None), self.layer
        heads, group, dim = self.shape.num_kv_heads, self.shape.group_size, self.shape.head_dim
        out = self.scratch.take("out", q.shape[0], heads, group, dim)
        out[self.num_queries :] = 0.0
        grouped = q.reshape(-1, heads, group, dim)
        sinks = None if sinks is None else sinks.view(heads, 1, group)
        for decode in self.decode:
            self._run_decode(decode, grouped, cache, sinks, out)
        for prompt in self.prompts:
            self._run_prompt(prompt, grouped, cache, sinks, out)
        return out.view(-1, heads * group, dim)

    def _run_decode(
        self, batch: _Decode, q: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        heads, group, dim = q.shape[1:]
        num_rows, padded = batch.num_rows, _ceil_to(group, QUERY_ALIGNMENT)
        keys, values = self._gathered(batch.gather, num_rows, batch.num_keys, cache)
        queries = self._queries(heads * num_rows, padded)
        real = queries.view(heads, num_rows, padded, dim)[:, :, :group]
        torch.mul(q[batch.queries].transpose(0, 1), self.layer.scale, out=real)
        scores = self._scores(queries, keys)
        by_row = scores.view(heads, num_rows, padded, -1)
        self._set_sinks(by_row[:, :, :group], sinks)
        by_row[..., self._lead :].add_(batch.mask)
        mixed = self._mix(scores, values).view(heads, num_rows, padded, dim)
        out[batch.queries] = mixed[:, :, :group].transpose(0, 1)

    def _run_prompt(
        self, row: _Prompt, q: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        heads, group = q.shape[1:3]
        keys, values = self._gathered(row.gather, 1, row.num_keys, cache)
        num_rows = (row.last - row.first) * group
        queries = self._queries(heads, _ceil_to(num_rows, QUERY_ALIGNMENT))
        real = queries[:, :num_rows].unflatten(1, (-1, group))
        torch.mul(q[row.first : row.last].transpose(0, 1), self.layer.scale, out=real)
        for block in row.blocks:
            high = _ceil_to(block.high * group, QUERY_ALIGNMENT)  # only the last block can need it
            scores = self._scores(queries[:, block.low * group : high], keys[:, block.keys])
            real = scores[:, : (block.high - block.low) * group].unflatten(1, (-1, group))
            self._set_sinks(real, sinks)
            for masked, mask in block.masks:
                real[..., self._lead :][..., masked].add_(mask)
            mixed = self._mix(scores, values[:, block.keys])[:, : (block.high - block.low) * group]
            target = out[row.first + block.low : row.first + block.high]
            target.copy_(mixed.unflatten(1, (-1, group)).transpose(0, 1))

    @property
    def _lead(self) -> int:
        """Lanes of scores before those of keys."""
        return 0 if self.layer.sink is None else LANES

    def _set_sinks(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> None:
        """Of scores [Hkv, rows, G, lead + C] the lanes before keys; sinks [Hkv, 1, G]."""
        if sinks is not None:
            scores[..., 1 : self._lead] = -torch.inf
            scores[..., 0] = sinks

    def _queries(self, batch: int, rows: int) -> torch.Tensor:
        """[batch, rows, D] to be filled. Rows of padding stay what they are, even NaN: nobody reads their results."""
        return self.scratch.take("queries", batch, rows, self.shape.head_dim)

    def _gathered(
        self, gather: torch.Tensor, num_rows: int, num_keys: int, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [Hkv * B, C, D]."""
        shape = self.shape
        pages = self.scratch.take("gathered", len(gather), shape.page_size * shape.head_dim)
        if cache.dtype == pages.dtype:
            torch.index_select(cache.view(-1, shape.page_size * shape.head_dim), 0, gather, out=pages)
        else:
            pages.copy_(cache.view(-1, shape.page_size * shape.head_dim).index_select(0, gather))
        both = pages.view(2, shape.num_kv_heads * num_rows, num_keys, shape.head_dim)
        return both[0], both[1]

    def _scores(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """queries [b, Q, D] (scaled), keys [b, C, D]; returns [b, Q, lead + C], capped."""
        out = self.scratch.take("scores", queries.shape[0], queries.shape[1], self._lead + keys.shape[1])
        torch.bmm(queries, keys.transpose(1, 2), out=out[:, :, self._lead :])
        return out if self.layer.softcap is None else soft_cap_(out, self.layer.softcap)

    def _mix(self, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """softmax(scores) @ values, one product a tile, in order; scores [b, Q, lead + C], returns [b, Q, D]."""
        weights = torch.softmax(scores, -1, out=self.scratch.take("weights", *scores.shape))[:, :, self._lead :]
        mixed = self.scratch.take("mixed", *scores.shape[:2], self.shape.head_dim)
        torch.bmm(weights[:, :, : self.tile], values[:, : self.tile], out=mixed)
        for low in range(self.tile, weights.shape[2], self.tile):
            mixed.baddbmm_(weights[:, :, low : low + self.tile], values[:, low : low + self.tile])
        return mixed


@dataclass(slots=True)
class _Scratch:
    """Named buffers that only grow: a fresh large allocation costs more in page faults than the work done in it."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """An uninitialised fp32 tensor, valid until the same name is taken again."""
        size = math.prod(shape)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name] = torch.empty(size)
        return buffer[:size].view(shape)
