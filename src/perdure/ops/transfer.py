"""Arrays of the host on their way to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sent(values: NDArray[Any], device: torch.device) -> Tensor:
    """There, without waiting for what runs there."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
