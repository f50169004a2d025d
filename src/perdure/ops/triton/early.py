"""Kernels that are launched before the one before them has ended (Hopper's programmatic dependent launch).

- Such a kernel may ask for weights, which the kernel before did not write. Then all its programs wait for that one
  (`gdc_wait`), and read and write as ever: so none ends before all that were launched earlier.
- First of all it lets the next begin (`gdc_launch_dependents`), which waits likewise.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """Options of such a launch, none where a device has it not."""
    has_it = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"launch_pdl": True} if has_it else {}
