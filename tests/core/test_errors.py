"""Errors as values: a class by name, and a message that can be read."""

from __future__ import annotations

import pickle
import re

import pytest

from perdure.api import errors
from perdure.api.event import Failure

CLASSES = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.PerdureError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_a_message_leaves_out_the_middle_of_a_long_value(kind: type[errors.PerdureError]) -> None:
    """Whatever quotes a value: what it is and what is wrong with it stand at the ends."""
    error = kind(f"prompt={b'x' * 1_000_000!r} is neither text nor a list of token ids")
    for text in (str(error), repr(error), str(pickle.loads(pickle.dumps(error)))):
        assert len(text) < 800
        assert "prompt=b'xxx" in text and "xxx' is neither text nor a list of token ids" in text
        assert re.search(r"\(999[45]\d\d characters\)", text)
    assert str(Failure.of(error).to_exception()) == str(error)


@pytest.mark.parametrize("kind", CLASSES)
def test_others_are_whole(kind: type[errors.PerdureError]) -> None:
    for message in ("", "page_size=0 is out of range: 1 to 256", "x" * errors.LONGEST_MESSAGE):
        assert str(kind(message)) == message
