"""Attention over paged keys and values: one meaning, several forms. `make_attention` chooses one by name."""

from __future__ import annotations

from perdure.ops.attention.base import AttentionForm, AttentionRows, CacheShape, LayerAttention, PlannedAttention, Sink
from perdure.ops.attention.plain import PlainAttention
from perdure.ops.attention.reference import ReferenceAttention
from perdure.ops.attention.tiled import TiledAttention
from perdure.ops.native import library, why_not
from perdure.ops.native.attention import NativeAttention, can_attend

FORMS = ("native", "tiled", "plain", "reference")

__all__ = [
    "FORMS",
    "AttentionForm",
    "AttentionRows",
    "CacheShape",
    "LayerAttention",
    "PlannedAttention",
    "Sink",
    "make_attention",
]


def make_attention(name: str, shape: CacheShape, layer: LayerAttention, *, batch_invariant: bool) -> AttentionForm:
    """The form called `name` for layers of one kind; "auto" is the fastest that keeps the promise.

    ValueError: an unknown name, a form that is not invariant where that was asked, or one without what the kind needs.
    """
    found = library()
    if name == "auto":
        name = "native" if found is not None and can_attend(shape) else "tiled"
    if name not in FORMS:
        raise ValueError(f"attention_backend={name!r} is none of auto, {', '.join(FORMS)}")
    if name == "native":
        if found is None:
            raise ValueError(f"attention_backend='native' needs compiled kernels: {why_not()}")
        return NativeAttention(found, shape, layer)
    if batch_invariant and name == "plain":
        raise ValueError("attention_backend='plain' is not batch invariant; use 'auto' or batch_invariant=False")
    forms: dict[str, type[TiledAttention | PlainAttention | ReferenceAttention]] = {
        "tiled": TiledAttention,
        "plain": PlainAttention,
        "reference": ReferenceAttention,
    }
    return forms[name](shape, layer)
