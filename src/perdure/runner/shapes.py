"""The shapes that graphs are captured for, and which of them a step takes. Pure: no tensors, no device.

- A shape is so many tokens with so many rows that may be prompts and so many that decode; a step is padded to it.
- Three rules say which numbers of tokens there are: halves of the most ("exponential"), even steps ("linear"), and the
  first for steps with prompts with the second for those without ("hybrid").

The rules are those of Megatron's inference engine, so that what is known of its sets holds here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log2
from typing import Literal

Sizing = Literal["exponential", "linear", "hybrid"]
AS_MANY_AS_FIT = -1


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
    a step with both kinds may hold; 0 = only steps that decode are captured.
    """

    max_rows: int
    max_len: int
    max_tokens: int
    num_graphs: int
    sizing: Sizing
    most_tokens: int
    mixed_prefills: int = 0
    all_prefills: bool = False

    @property
    def ceiling(self) -> int:
        if self.all_prefills:
            return self.max_tokens
        return min(max(self.most_tokens, self.max_rows), self.max_tokens)


def exponential(most: int, count: int) -> list[int]:
    """Halves of most, each even; with most itself and 1. Descending."""
    if count == AS_MANY_AS_FIT:
        count = max(4, floor(log2(max(2, most))) + 2)
    if count == 1:
        return [most]
    sizes, size = {most, 1}, most
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
    of_decodes = exponential if rules.sizing == "exponential" else linear
    found = {Shape(size, 0, size) for size in of_decodes(most_decodes, _count(rules, most_decodes))}
    if rules.num_graphs == AS_MANY_AS_FIT:
        found |= {Shape(size, 0, size) for size in (1, 2) if size <= most_decodes}
    if rules.mixed_prefills > 0:
        of_prompts = linear if rules.sizing == "linear" else exponential
        for size in of_prompts(most, _count(rules, most)):
            if size >= 2:
                found |= {shape for shape in _with_prompts(size, rules) if _is_possible(shape, rules)}
    return sorted(found, reverse=True)


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


def _count(rules: ShapeRules, most: int) -> int:
    return rules.num_graphs if rules.num_graphs == AS_MANY_AS_FIT else min(max(rules.num_graphs, 1), most)


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
