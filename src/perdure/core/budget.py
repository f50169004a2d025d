"""How many pages positions take, and how many steps a burst has. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.core.state import RequestState

IN_VAIN = 8
"""A burst is shorter where more than one part in so many of its rows' steps would be of rows that have ended."""

FEW = 8
"""Unless they are no more than those of so many rows: a step of few takes as long as one of fewer, and while a burst
is short the host has little time for the next one."""

SOON_OVER = 16
"""One that may stop at any token is taken to go on for one part in so many of what it has."""

LEAST_BESIDE = 128
"""Prompts have so many positions beside rows that decode, however many those are, or half of any step's."""


def num_pages_for(num_positions: int, page_size: int) -> int:
    return -(-num_positions // page_size)


def burst(
    left: Sequence[int], room: Sequence[int], most_steps: int, num_free: int, page_size: int
) -> tuple[list[int], list[int]]:
    """How many steps each row takes part in, and how many pages it needs more for them.

    left: positions that each row may still compute; room: of them, for how many it has pages (at least 1). The longest
    row takes part in as many steps as are sensible up to most_steps; others end inside.
    """
    num_steps, num_rows = min(most_steps, max(left)), len(left)
    while num_steps > 1:
        lengths = [min(num_steps, count) for count in left]
        pages = [num_pages_for(max(0, length - has), page_size) for length, has in zip(lengths, room, strict=True)]
        in_vain = num_steps * num_rows - sum(lengths)
        if in_vain <= num_steps * max(FEW, num_rows / IN_VAIN) and sum(pages) <= num_free:
            return lengths, pages
        num_steps //= 2
    return [1] * len(left), [0] * len(left)


def beside(num_decodes: int, most: int, most_mixed: int) -> int:
    """How many positions of prompts a step has beside so many rows that decode. most, most_mixed: positions of any
    step, and those that one which others wait for should have. However little that leaves, prompts have a floor."""
    least = min(LEAST_BESIDE, most // 2)
    return min(max(most_mixed - num_decodes, least), most - num_decodes)


def likely_steps(state: RequestState) -> int:
    """How many more the request will take part in."""
    left = state.last_position - state.num_planned
    return min(left, state.num_output // SOON_OVER) if state.stops.can_stop else left
