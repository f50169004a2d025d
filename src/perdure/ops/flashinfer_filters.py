"""top_k and top_p by FlashInfer's kernels: another form of `ops.triton.filters.find_kept`.

- It says which ids are kept; what is drawn of them is drawn as ever. Equals at a border are all kept.
- Masses are sums in fp32: where top_p keeps tens of thousands of ids, the last of them may be another one.
- The package compiles its kernels when they are first asked for, which takes a CUDA compiler and a minute or two.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from perdure.ops.select import TINY
from perdure.ops.triton.adjust import Adjusted
from perdure.ops.triton.sampling import restrict
from perdure.ops.triton.weights import Kept, Masses, Settings


def why_not() -> str | None:
    """What is missing here; None: nothing."""
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    return None


def find_kept(x: Adjusted, settings: Settings, masses: Masses) -> Kept:
    """`ops.triton.filters.find_kept`."""
    from flashinfer.sampling import top_k_mask_logits, top_p_renorm_probs

    vocab_size = x.logits.shape[1]
    top = x.best.amax(1)
    is_drawn = torch.isfinite(top) & (settings.temperature > 0) & (settings.top_k != 1)
    scaled = _scaled(x, settings, top)
    scaled = torch.where(is_drawn[:, None], scaled, 0.0)  # of the others nothing is wanted, and no NaN goes further
    left = torch.where(scaled.exp() >= settings.min_p[:, None], scaled, -torch.inf)
    has_k = (settings.top_k > 0) & (settings.top_k < vocab_size)
    left = top_k_mask_logits(left, torch.where(has_k, settings.top_k, vocab_size))
    kept = top_p_renorm_probs(torch.softmax(left, -1), settings.top_p.float())
    is_kept = torch.where((settings.top_p < 1.0)[:, None], kept > 0, left > -torch.inf)
    border = torch.where(is_kept, scaled, torch.inf).amin(1)
    found = Kept(border, torch.full_like(settings.top_k, vocab_size))
    restrict(x, settings, found, masses)
    return found


def _scaled(x: Adjusted, settings: Settings, top: Tensor) -> Tensor:
    """As they are drawn from [n, V]."""
    asked = (settings.asked != 0) | (settings.masks != 0)
    values = torch.where(asked[:, None], x.values, x.logits.float())
    return (values - top[:, None]) / settings.temperature.clamp(min=TINY)[:, None]
