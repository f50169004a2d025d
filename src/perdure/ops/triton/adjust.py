"""`ops.adjust` on the device: what is done to a row's logits before its temperature, and the history it needs.

- What one row asked is one block of words on the device (`make_block`), made when the row is there. Kernels get its
  address (0: the row asked nothing); the block's own head says where in it everything is.
- The history in it grows where a token is drawn (`learn`), so steps in flight see the true one and the host sends
  nothing. `KNOWN` counts it: a draw at another output index than that is none, its row is `STALE`.
- Masks of a single step (a grammar's) have an address of their own.
- Every rounding is that of `ops.adjust`. What only excludes ids commutes with what adds to them, and goes where it is
  cheap.

Shapes: n rows, V = vocabulary, W = words of 32 bits that hold it, C = chunks of CHUNK ids, nb = their blocks of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from perdure.ops.select import Floats, Ids
from perdure.ops.triton.launches import cdiv

CHUNK = 4096  # ids of one program
PART = 1024  # of these handled at once where something was asked

# A block's head: numbers, and where (AT_) in the block lists begin, 0 = there is none.
KNOWN = tl.constexpr(0)
"""Tokens of the output that the history holds: the output index of the next one."""
LOOKS_BACK = tl.constexpr(1)
PROMPT_LENGTH = tl.constexpr(2)
REPETITION = tl.constexpr(3)
PRESENCE = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
NUM_BIAS = tl.constexpr(6)
AT_BIAS = tl.constexpr(7)
"""Ids, ascending, then as many values."""
AT_ALLOWED = tl.constexpr(8)
"""[W], what may ever be sampled."""
MIN_TOKENS = tl.constexpr(9)
AT_LATER = tl.constexpr(10)
"""[W], what may be sampled before MIN_TOKENS."""
NUM_WORDS = tl.constexpr(11)
LONGEST = tl.constexpr(12)
AT_WORDS = tl.constexpr(13)
"""[1 + LONGEST, NUM_WORDS]: lengths, then ids from the last one back."""
AT_HISTORY = tl.constexpr(14)
"""By absolute position."""
ROOM = tl.constexpr(15)
"""Positions of the history."""
AT_COUNTS = tl.constexpr(16)
"""[V]: how often an id is in the output, + IN_PROMPT."""
HEAD = 18
IN_PROMPT = tl.constexpr(1 << 30)

FINE, UNUSABLE, NOTHING_LEFT, STALE = (tl.constexpr(code) for code in range(4))
"""What came of a row: a token; the model's logits hold NaN or nothing finite; what it asked leaves nothing; see
above."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one row asked. early: ids that cannot be sampled at output indices below min_tokens. words: bad words of
    several ids. penalties: repetition, presence, frequency. history: all known tokens, prompt first, if it looks back.
    """

    prompt_length: int
    bias_ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    bias_values: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    allowed: Ids | None = None
    banned: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    early: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    min_tokens: int = 0
    words: Sequence[tuple[int, ...]] = ()
    penalties: tuple[float, float, float] | None = None
    history: Sequence[int] = ()

    @property
    def looks_back(self) -> bool:
        return bool(self.words) or self.penalties is not None


def make_block(asked: Asked, vocab_size: int, max_length: int, device: torch.device) -> Tensor:
    """The row's block. max_length: of a history."""
    head = np.zeros(HEAD, np.int32)
    parts = [head]

    def put(values: NDArray[np.int32]) -> int:
        at = sum(map(len, parts))
        parts.append(values)
        return at

    head[PROMPT_LENGTH.value] = asked.prompt_length
    if len(asked.bias_ids):
        head[NUM_BIAS.value] = len(asked.bias_ids)
        head[AT_BIAS.value] = put(asked.bias_ids.astype(np.int32))
        put(asked.bias_values.astype(np.float32).view(np.int32))
    if asked.allowed is not None or len(asked.banned):
        allowed = np.full(vocab_size, asked.allowed is None)
        if asked.allowed is not None:
            allowed[asked.allowed] = True
        allowed[asked.banned] = False
        head[AT_ALLOWED.value] = put(as_bits(allowed))
    if asked.min_tokens and len(asked.early):
        later = np.ones(vocab_size, np.bool_)
        later[asked.early] = False
        head[MIN_TOKENS.value] = asked.min_tokens
        head[AT_LATER.value] = put(as_bits(later))
    if asked.words:
        longest = max(map(len, asked.words))
        table = np.full((1 + longest, len(asked.words)), -1, np.int32)
        for column, word in enumerate(asked.words):
            table[0, column] = len(word)
            table[1 : 1 + len(word), column] = word[::-1]
        head[[NUM_WORDS.value, LONGEST.value]] = len(asked.words), longest
        head[AT_WORDS.value] = put(table.ravel())
    at_counts = num_words = sum(map(len, parts))
    if asked.looks_back:
        assert asked.prompt_length <= len(asked.history) <= max_length, (asked.prompt_length, len(asked.history))
        head[[LOOKS_BACK.value, ROOM.value]] = 1, max_length
        head[KNOWN.value] = len(asked.history) - asked.prompt_length
        head[AT_HISTORY.value] = put(np.array(asked.history, np.int32))
        at_counts = num_words = head[AT_HISTORY.value] + max_length
    if asked.penalties is not None:
        head[AT_COUNTS.value] = at_counts
        head[REPETITION.value : FREQUENCY.value + 1] = np.array(asked.penalties, np.float32).view(np.int32)
        num_words = at_counts + vocab_size
    block = torch.empty(num_words, dtype=torch.int32, device=device)
    words = torch.from_numpy(np.concatenate(parts))
    block[: len(words)].copy_(words.pin_memory() if device.type == "cuda" else words, non_blocking=True)
    if asked.penalties is not None:
        known = block[head[AT_HISTORY.value] :][: len(asked.history)].long()
        counts = block[at_counts:].zero_()
        counts.index_fill_(0, known[: asked.prompt_length], IN_PROMPT.value)
        output = known[asked.prompt_length :]
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
    return block


def history_of(block: Tensor) -> tuple[list[int], dict[int, int]]:
    """What a row's block knows: its tokens so far, and how often each id that is in it is in the output (0: only in the
    prompt). Waits for the device; for checking."""
    words = block.cpu().numpy()
    at, length = words[AT_HISTORY.value], words[PROMPT_LENGTH.value] + words[KNOWN.value]
    tokens = words[at : at + length].tolist() if at else []
    counts = words[words[AT_COUNTS.value] :] if words[AT_COUNTS.value] else np.empty(0, np.int32)
    return tokens, {id_: int(counts[id_] & (IN_PROMPT.value - 1)) for id_ in np.flatnonzero(counts).tolist()}


def as_bits(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[V] as words [W]: id i is bit i % 32 of word i // 32."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, np.bool_)
    padded[: len(allowed)] = allowed
    bits: NDArray[np.int32] = np.packbits(padded, bitorder="little").view(np.int32)
    return bits


@triton.jit
def words_at(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _floats_at(words):
    return words.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def _only(x, bits, ids, inside):
    """x where the bit of its id is set, else -inf."""
    word = tl.load(bits + ids // 32, mask=inside, other=0)
    return tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))


@triton.jit
def _penalised(x, words, ids, inside):
    seen = tl.load(words + tl.load(words + AT_COUNTS) + ids, mask=inside, other=0)
    count = seen & (IN_PROMPT - 1)
    settings = _floats_at(words)
    repetition = tl.load(settings + REPETITION)
    scaled = tl.where(x > 0.0, tl.div_rn(x, tl.full(x.shape, repetition, tl.float32)), x * repetition)
    x = tl.where(seen != 0, scaled, x)
    in_output = (count > 0).to(tl.float32)
    return x - (tl.load(settings + FREQUENCY) * count.to(tl.float32) + tl.load(settings + PRESENCE) * in_output)


@triton.jit
def _add_bias(x, out, words, first, ids, inside, CHUNK: tl.constexpr):
    """By way of memory: out is where id 0 of the row is."""
    tl.store(out + ids, x, mask=inside)
    tl.debug_barrier()
    count = tl.load(words + NUM_BIAS)
    given = words + tl.load(words + AT_BIAS)
    for start in range(0, count, 128):
        entry = start + tl.arange(0, 128)
        id_ = tl.load(given + entry, mask=entry < count, other=-1)
        here = (id_ >= first) & (id_ < first + CHUNK)
        value = tl.load(_floats_at(given) + count + entry, mask=here, other=0.0)
        tl.store(out + id_, tl.load(out + id_, mask=here, other=0.0) + value, mask=here)
    tl.debug_barrier()
    return tl.load(out + ids, mask=inside, other=float("-inf"))


@triton.jit
def _ban_words(x, out, words, position, first, ids, inside, CHUNK: tl.constexpr):
    """Without the last ids of words whose others stand before position."""
    tl.store(out + ids, x, mask=inside)
    tl.debug_barrier()
    count = tl.load(words + NUM_WORDS)
    longest = tl.load(words + LONGEST)
    table = words + tl.load(words + AT_WORDS)
    history = words + tl.load(words + AT_HISTORY)
    for start in range(0, count, 32):
        word = start + tl.arange(0, 32)
        length = tl.load(table + word, mask=word < count, other=0)
        comes = (length > 0) & (length <= position + 1)
        for back in range(1, longest):
            inner = comes & (back < length)
            its = tl.load(table + (back + 1) * count + word, mask=inner, other=0)
            stands = tl.load(history + tl.maximum(position - back, 0))
            comes = comes & ((back >= length) | (its == stands))
        last = tl.load(table + count + word, mask=comes, other=-1)
        here = comes & (last >= first) & (last < first + CHUNK)
        tl.store(out + last, tl.full((32,), float("-inf"), tl.float32), mask=here)
    tl.debug_barrier()
    return tl.load(out + ids, mask=inside, other=float("-inf"))


@triton.jit
def _largest(x, ids):
    """The largest value, NaN where there is one, and the first id that has it."""
    largest = tl.max(x, 0)
    first = tl.min(tl.where(x == largest, ids, 2147483647), 0)
    is_nan = tl.max((x != x).to(tl.int32), 0) > 0
    return tl.where(is_nan, float("nan"), largest), first


@triton.jit
def _adjusted_part(logits, out, block, bits, index, V, first, PART: tl.constexpr):
    """Values of a part of a row after what was asked: also into out."""
    ids = first + tl.arange(0, PART)
    inside = ids < V
    x = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    if block != 0:
        words = words_at(block)
        if tl.load(words + NUM_BIAS) > 0:
            x = _add_bias(x, out, words, first, ids, inside, PART)
        if tl.load(words + AT_COUNTS) > 0:
            x = _penalised(x, words, ids, inside)
        if tl.load(words + AT_ALLOWED) > 0:
            x = _only(x, words + tl.load(words + AT_ALLOWED), ids, inside)
        if index < tl.load(words + MIN_TOKENS):
            x = _only(x, words + tl.load(words + AT_LATER), ids, inside)
        if tl.load(words + NUM_WORDS) > 0:
            position = tl.load(words + PROMPT_LENGTH) + index
            x = _ban_words(x, out, words, position, first, ids, inside, PART)
    if bits != 0:
        x = _only(x, words_at(bits), ids, inside)
    tl.store(out + ids, x, mask=inside)
    return x, ids


@triton.jit
def _adjust_kernel(
    logits, adjusted, raw_best, best, best_id, raw_block_best, block_best, asked, masks, output_index, V, stride,
    CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A chunk of a row: into adjusted if the row asked anything, a part at a time since that takes registers; the
    largest values before and after."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    block, bits = tl.load(asked + row), tl.load(masks + row)
    cell = row * tl.num_programs(1) + chunk
    to = cell * (CHUNK // 64) + tl.arange(0, CHUNK // 64)
    of_blocks = tl.max(tl.reshape(x, (CHUNK // 64, 64)), 1)
    top, top_id = _largest(x, ids)
    tl.store(raw_block_best + to, of_blocks)
    tl.store(raw_best + cell, top)
    if (block == 0) & (bits == 0):
        tl.store(block_best + to, of_blocks)
        tl.store(best + cell, top)
        tl.store(best_id + cell, top_id)
    else:
        index = tl.load(output_index + row)
        most, most_id, any_nan = tl.full((), float("-inf"), tl.float32), top_id, top != top
        for low in range(0, CHUNK, PART):
            y, its = _adjusted_part(logits, adjusted + row * V, block, bits, index, V, chunk * CHUNK + low, PART)
            blocks = (cell * CHUNK + low) // 64 + tl.arange(0, PART // 64)
            tl.store(block_best + blocks, tl.max(tl.reshape(y, (PART // 64, 64)), 1))
            largest, first = _largest(y, its)
            any_nan = any_nan | (largest != largest)
            most_id = tl.where((low == 0) | (largest > most), first, most_id)
            most = tl.maximum(most, largest)
        tl.store(best + cell, tl.where(any_nan, float("nan"), most))
        tl.store(best_id + cell, most_id)


@triton.jit
def learn(block, index, token, code):
    """A row's token is known: `code`, or STALE where its history is not at this output index; else it is in it now."""
    if block != 0:
        words = words_at(block)
        if tl.load(words + LOOKS_BACK) != 0:
            if tl.load(words + KNOWN) != index:
                code = tl.where(code == FINE, STALE, code)
            if code == FINE:
                tl.store(words + KNOWN, index + 1)
                position = tl.load(words + PROMPT_LENGTH) + index
                if position < tl.load(words + ROOM):
                    tl.store(words + tl.load(words + AT_HISTORY) + position, token)
                counts = tl.load(words + AT_COUNTS)
                if counts != 0:
                    tl.store(words + counts + token, tl.load(words + counts + token) + 1)
    return code


@dataclass(frozen=True, slots=True)
class Adjusted:
    """logits [n, V], as the model gave them, in its type. values [n, V] (fp32): after what was asked, where a row asked
    anything. raw_best, best [n, C]: the largest of each chunk before and after, NaN where there is one; best_id: the
    first id of it after. raw_block_best, block_best [n, nb]: the same of each block of 64, NaN aside."""

    logits: Tensor
    values: Tensor
    raw_best: Tensor
    best: Tensor
    best_id: Tensor
    raw_block_best: Tensor
    block_best: Tensor


def adjust(logits: Tensor, asked: Tensor, masks: Tensor, output_index: Tensor) -> Adjusted:
    """asked, masks [n] (int64): addresses of blocks and of masks [W], or 0."""
    values = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    return _adjusted(logits, values, asked, masks, output_index)


def unadjusted(logits: Tensor) -> Adjusted:
    """Of rows that asked nothing: there are no values beside the logits, whatever type those have."""
    none = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return _adjusted(logits, torch.empty(0, device=logits.device), none, none, none)


def _adjusted(logits: Tensor, values: Tensor, asked: Tensor, masks: Tensor, output_index: Tensor) -> Adjusted:
    num_rows, vocab_size = logits.shape
    chunks = cdiv(vocab_size, CHUNK)
    raw_best, best = (torch.empty(num_rows, chunks, dtype=torch.float32, device=logits.device) for _ in range(2))
    best_id = torch.empty(num_rows, chunks, dtype=torch.int32, device=logits.device)
    raw_block_best, block_best = (
        torch.empty(num_rows, chunks * CHUNK // 64, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    if num_rows:
        _adjust_kernel[(num_rows, chunks)](
            logits, values, raw_best, best, best_id, raw_block_best, block_best, asked, masks, output_index, vocab_size,
            logits.stride(0), CHUNK=CHUNK, PART=PART, num_warps=4, maxnreg=64, enable_fp_fusion=False,
        )  # fmt: skip
    return Adjusted(logits, values, raw_best, best, best_id, raw_block_best, block_best)
