"""How many positions a row may compute in a step. Pure arithmetic; there is no least chunk."""

from __future__ import annotations


def chunk_length(remaining: int, left: int) -> int:
    """Of `remaining` positions of a prompt the part that fits into what is left of the step's token budget."""
    return min(remaining, left)


def num_pages_for(num_positions: int, page_size: int) -> int:
    return -(-num_positions // page_size)
