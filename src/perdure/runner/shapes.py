"""The shapes that graphs are captured for, and which of them a step takes. Pure: no tensors, no device.

- A shape is so many tokens with so many rows that may be prompts and so many that decode; a step is padded to it.
- Three rules say which numbers of tokens there are: halves of the most ("exponential"), even steps ("linear"), and the
  first for steps with prompts with the second for those without ("hybrid").
- A GPU captures the shapes; on a CPU steps are padded to them where somebody asks, so that the rules are seen at work.

The rules are those of Megatron's inference engine, so that what is known of its sets holds here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, floor, log2
from typing import Literal

from perdure.api.config import EngineConfig

Sizing = Literal["exponential", "linear", "hybrid"]
AS_MANY_AS_FIT = -1
INVARIANT_MULTIPLE = 64
"""Of a step's tokens where its rows' bits must not depend on how many there are."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """num_tokens of a step, with room for so many rows of prompts and so many of one token."""

    num_tokens: int
    num_prompts: int
    num_decodes: int

    @property
    def num_rows(self) -> int:
        return self.num_prompts + self.num_decodes


@dataclass(frozen=True, slots=True)
class ShapeRules:
    """What the sets depend on.

    max_rows, max_len, max_tokens: of requests in a step, of a request, of tokens in a step. num_graphs: how many sizes
    a set has; -1 = as the rule has them. most_tokens: of a graph, unless all_prefills. mixed_prefills: how many prompts
    a step with both kinds may hold; 0 = only steps that decode are captured. multiple: of which tokens come in a step.
    """

    max_rows: int
    max_len: int
    max_tokens: int
    num_graphs: int
    sizing: Sizing
    most_tokens: int
    mixed_prefills: int = 0
    all_prefills: bool = False
    multiple: int = 1

    @staticmethod
    def of(config: EngineConfig, max_len: int) -> ShapeRules:
        """As configured, for requests of this length at most."""
        most = config.max_num_batched_tokens
        assert most is not None and config.num_cuda_graphs != 0 and config.cuda_graph_mixed_prefill is not None
        return ShapeRules(
            max_rows=min(config.max_num_seqs, most),
            max_len=max_len,
            max_tokens=most,
            num_graphs=config.num_cuda_graphs,
            sizing=config.cuda_graph_sizing,
            most_tokens=config.cuda_graph_max_tokens,
            mixed_prefills=config.cuda_graph_mixed_prefill,
            all_prefills=config.cuda_graph_all_prefills,
            multiple=INVARIANT_MULTIPLE if config.batch_invariant else 1,
        )

    @property
    def ceiling(self) -> int:
        """Tokens of the largest step that is captured."""
        return self.max_tokens if self.all_prefills else min(max(self.most_tokens, self.max_rows), self.max_tokens)

    @property
    def most_mixed(self) -> int:
        """Tokens that a step with prompts should have where others decode, also if larger ones are captured; 0 = none
        with prompts is."""
        return replace(self, all_prefills=False).ceiling if self.mixed_prefills else 0


def exponential(most: int, count: int, least: int = 1) -> list[int]:
    """Halves of most, each even; with most itself and least. Descending."""
    if count == AS_MANY_AS_FIT:
        count = max(4, floor(log2(max(2, most))) + 2)
    if count == 1:
        return [most]
    sizes, size = {most, least}, most
    for _ in range(count):
        size //= 2
        if size < 1:
            break
        sizes.add(max(2, size // 2 * 2))
    kept = sorted((s for s in sizes if s <= most), reverse=True)
    while len(kept) > count:
        del kept[-2]
    return kept


def linear(most: int, count: int) -> list[int]:
    """Even steps up to most. Descending."""
    if count == AS_MANY_AS_FIT:
        steps: Iterable[int] = (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16))
    else:
        step = 2 * ceil(most / count / 2)
        steps = range(step, most, step)
    return sorted({*(size for size in steps if size <= most), most}, reverse=True)


def shapes(rules: ShapeRules) -> list[Shape]:
    """All that are captured, the largest first."""
    most = rules.ceiling
    most_decodes = min(most, rules.max_rows)
    found = {Shape(size, 0, size) for size in _sizes(rules, most_decodes, rules.sizing == "exponential")}
    if rules.num_graphs == AS_MANY_AS_FIT:
        found |= {Shape(size, 0, size) for size in (1, 2) if size <= most_decodes}
    if rules.mixed_prefills > 0:
        for size in _sizes(rules, most, rules.sizing != "linear"):
            if size >= 2:
                found |= {shape for shape in _with_prompts(size, rules) if _is_possible(shape, rules)}
    whole = rules.multiple
    return sorted({replace(shape, num_tokens=-(-shape.num_tokens // whole) * whole) for shape in found}, reverse=True)


def match(captured: Iterable[Shape], num_tokens: int, num_prompts: int, num_decodes: int) -> Shape | None:
    """The smallest shape that such a step fits into; a row that decodes may take a prompt's place."""
    fitting = (
        shape
        for shape in captured
        if shape.num_tokens >= num_tokens
        and shape.num_prompts >= num_prompts
        and shape.num_rows >= num_prompts + num_decodes
        and (num_prompts > 0 or shape.num_prompts == 0)
    )
    return min(fitting, default=None)


class ShapeSet:
    """The shapes of one engine, and which of them its steps took.

    num_steps: by shape, of those that were padded to it. num_others: of those that none fitted, which ran as they were.
    """

    def __init__(self, rules: ShapeRules) -> None:
        self.shapes = shapes(rules)
        self.num_steps = dict.fromkeys(self.shapes, 0)
        self.num_others = 0

    @property
    def in_words(self) -> str:
        """How many there are, and the largest."""
        return f"{len(self.shapes)}, of up to {max(self.shapes).num_tokens} tokens"

    def take(self, num_tokens: int, num_prompts: int, num_decodes: int, num_steps: int = 1) -> Shape | None:
        """The shape that such a step, or so many, is padded to; None: it runs as it is."""
        shape = match(self.shapes, num_tokens, num_prompts, num_decodes)
        if shape is None:
            self.num_others += num_steps
        else:
            self.num_steps[shape] += num_steps
        return shape


def _sizes(rules: ShapeRules, most: int, by_halves: bool) -> list[int]:
    count = rules.num_graphs if rules.num_graphs == AS_MANY_AS_FIT else min(max(rules.num_graphs, 1), most)
    return exponential(most, count, rules.multiple) if by_halves else linear(most, count)


def _with_prompts(size: int, rules: ShapeRules) -> Iterable[Shape]:
    """Of one number of tokens: mixed with decoding rows, and prompts alone."""
    most_rows = rules.max_rows
    if rules.sizing == "linear":
        numbers = [min(rules.mixed_prefills, most_rows)]
    else:
        numbers = [*(1 << power for power in range(most_rows.bit_length()) if 1 << power < most_rows), most_rows]
    for prompts in numbers:
        yield Shape(size, prompts, min(max(size - prompts, 0), most_rows - prompts))
    least = max(rules.mixed_prefills, ceil(size / max(1, rules.max_len - 1)))
    if least < most_rows:
        yield Shape(size, max(least, min(most_rows, size)), 0)


def _is_possible(shape: Shape, rules: ShapeRules) -> bool:
    least, most = shape.num_rows, shape.num_prompts * rules.max_len + shape.num_decodes
    return shape.num_rows <= rules.max_rows and least <= shape.num_tokens <= most
