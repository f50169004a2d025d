"""`Fingerprint`: everything of an engine that the bits of its results depend on, each part in words.

Two engines of equal fingerprints continue a request with the same bits (with `batch_invariant`). Of unequal ones each
is right, but a result that crossed from one to the other is not promised to equal the undisturbed run.
"""

from __future__ import annotations

import msgspec


class Fingerprint(msgspec.Struct, frozen=True, array_like=True):
    """weights: a digest of the model's configuration and of every byte of its weights. dtype: what is computed in.
    device: the kind of device and its instructions. kernels: the forms of products and attention, with their tiles.
    threads: how many share a sum. libraries: names and versions."""

    weights: str = ""
    dtype: str = ""
    device: str = ""
    kernels: str = ""
    threads: str = ""
    libraries: str = ""

    def differences(self, here: Fingerprint) -> str:
        """What differs from an engine's own, for people; empty if nothing does."""
        pairs = [(name, getattr(self, name), getattr(here, name)) for name in self.__struct_fields__]
        return "; ".join(f"{name}: {then!r} there, {now!r} here" for name, then, now in pairs if then != now)
