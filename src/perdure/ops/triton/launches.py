"""Arithmetic of launches. Triton's functions of these names are made for kernels, too, and cost a launch 5 us more."""

from __future__ import annotations

from functools import cache

import torch


def cdiv(count: int, size: int) -> int:
    """How many blocks of this size hold so many."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """The least that is not below count, which is 1 at least."""
    return 1 << (count - 1).bit_length()


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
