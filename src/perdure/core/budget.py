"""How many pages positions take. Pure arithmetic."""

from __future__ import annotations


def num_pages_for(num_positions: int, page_size: int) -> int:
    return -(-num_positions // page_size)
