"""Attention over paged keys and values: one meaning, several forms. `make_attention` chooses one by name."""

from __future__ import annotations

from collections.abc import Callable

from perdure.ops.attention.base import AttentionForm, AttentionRows, CacheShape, LayerAttention, PlannedAttention
from perdure.ops.attention.plain import PlainAttention
from perdure.ops.attention.reference import ReferenceAttention
from perdure.ops.attention.tiled import TiledAttention

FORMS: dict[str, Callable[[CacheShape, LayerAttention], AttentionForm]] = {
    "plain": PlainAttention,
    "reference": ReferenceAttention,
    "tiled": TiledAttention,
}

__all__ = [
    "FORMS",
    "AttentionForm",
    "AttentionRows",
    "CacheShape",
    "LayerAttention",
    "PlannedAttention",
    "make_attention",
]


def make_attention(name: str, shape: CacheShape, layer: LayerAttention, *, batch_invariant: bool) -> AttentionForm:
    """The form called `name` for layers of one kind; "auto" is the fastest that keeps the promise.

    ValueError: an unknown name, a form that is not invariant where that was asked, or one without what the kind needs.
    """
    if name == "auto":
        name = "tiled"
    if name not in FORMS:
        raise ValueError(f"attention_backend={name!r} is none of auto, {', '.join(FORMS)}")
    form = FORMS[name](shape, layer)
    if batch_invariant and not form.batch_invariant:
        raise ValueError(f"attention_backend={name!r} is not batch invariant; use 'tiled' or batch_invariant=False")
    return form
