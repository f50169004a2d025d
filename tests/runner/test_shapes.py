"""The sets of shapes that graphs are captured for, and which of them a step takes."""

from __future__ import annotations

import pytest

from perdure.runner.shapes import AS_MANY_AS_FIT, Shape, ShapeRules, exponential, linear, match, shapes
from tests.witness import witness

LADDERS = {  # three graphs, at most 16 tokens, 32 with all prefills; the size that a mixed step of 7 tokens takes
    ("exponential", False): ([16, 8, 1], 8),
    ("exponential", True): ([32, 16, 1], 16),
    ("linear", False): ([16, 12, 6], 12),
    ("linear", True): ([32, 24, 12], 12),
    ("hybrid", False): ([16, 8, 1], 8),
    ("hybrid", True): ([32, 16, 1], 16),
}


@pytest.mark.parametrize(("sizing", "all_prefills"), LADDERS, ids=str)
def test_graph_rows(sizing, all_prefills):
    ladder, taken = LADDERS[sizing, all_prefills]
    rules = ShapeRules(8, 256, 32, 3, sizing, 16, mixed_prefills=2, all_prefills=all_prefills)
    captured = shapes(rules)
    with_prompts = sorted({shape.num_tokens for shape in captured if shape.num_prompts}, reverse=True)
    assert with_prompts == [size for size in ladder if size >= 2]
    shape = match(captured, 7, 1, 2)
    assert shape is not None and shape.num_tokens == taken
    # A prompt alone of more than 16 tokens is captured if all prefills are.
    alone = match(captured, 20, 1, 0)
    assert (alone is not None) == all_prefills
    assert rules.most_mixed == 16, "where others decode, whatever is captured"
    witness(f"graph-{sizing}-all{int(all_prefills)}", ladder=ladder, mixed_step=shape.num_tokens)


@pytest.mark.parametrize(
    ("most", "count", "expected"),
    [(16, 1, [16]), (1, 4, [1]), (40, 3, [40, 20, 1]), (256, AS_MANY_AS_FIT, [256, 128, 64, 32, 16, 8, 4, 2, 1])],
)
def test_exponential(most, count, expected):
    assert exponential(most, count) == expected


@pytest.mark.parametrize(
    ("most", "count", "expected"),
    [
        (40, 5, [40, 32, 24, 16, 8]),
        (10, 1, [10]),
        (7, 3, [7, 4]),
        (30, AS_MANY_AS_FIT, [30, 24, 16, 8, 4, 2, 1]),
        (290, AS_MANY_AS_FIT, [290, 288, 272, *range(256, 7, -8), 4, 2, 1]),
    ],
)
def test_linear(most, count, expected):
    assert linear(most, count) == expected


@pytest.mark.parametrize("sizing", ["exponential", "linear", "hybrid"])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("count", [AS_MANY_AS_FIT, 1, 5, 100])
def test_every_shape_is_possible_and_every_decode_step_fits(sizing, rows, count):
    rules = ShapeRules(rows, 50, 40, count, sizing, 32, mixed_prefills=3)
    captured = shapes(rules)
    assert len({*captured}) == len(captured) and captured == sorted(captured, reverse=True)
    for shape in captured:
        assert 0 < shape.num_rows <= rows and shape.num_rows <= shape.num_tokens <= 40
    for decodes in range(1, min(rows, rules.ceiling) + 1):
        shape = match(captured, decodes, 0, decodes)
        assert shape is not None and shape.num_prompts == 0 and shape.num_decodes >= decodes


def test_a_row_that_decodes_may_take_a_prompts_place():
    captured = [Shape(16, 4, 2), Shape(32, 2, 20), Shape(8, 0, 8)]
    assert match(captured, 8, 0, 8) == Shape(8, 0, 8)
    assert match(captured, 9, 0, 9) is None  # a step without prompts takes no shape with some
    assert match(captured, 12, 1, 5) == Shape(16, 4, 2)
    assert match(captured, 12, 1, 6) == Shape(32, 2, 20)
    assert match(captured, 33, 1, 1) is None
