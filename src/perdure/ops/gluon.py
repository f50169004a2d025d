"""Where kernels in Gluon serve (`ops.triton.hopper`, `ops.triton.gated`): it is Triton's language that says which warps
do what, and changes from one version of Triton to the next."""

from __future__ import annotations

import torch

VERSIONS = (["3", "6"],)  # of Triton, that they were run with


def why_not(device: torch.device) -> str | None:
    """Why they do not serve here; None = they do."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "it is for Hopper GPUs"
    import triton

    if triton.__version__.split(".")[:2] not in VERSIONS:
        return f"it was not run with Triton {triton.__version__}"
    return None
