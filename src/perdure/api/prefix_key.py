"""A short name of a page of tokens and all before it, the same wherever it is computed: routers and engines speak of
prefixes by these."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

KEY_BYTES = 8


def root_key(salt: str | None) -> bytes:
    """What first pages follow. salt: requests of another share nothing."""
    return b"" if salt is None else salt.encode()


def page_key(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Of the page of these tokens that follows `before`."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=KEY_BYTES).digest()
