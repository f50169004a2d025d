"""What callers give as prompts, brought into one form. A prompt that is wrong in itself becomes its own refusal.

`[1, 2, 3]` is one prompt of ids, `[]` an empty batch, `[[]]` a batch of one empty prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, cast

from perdure.api.errors import InvalidValue
from perdure.api.request import RequestId
from perdure.api.sampling import SamplingParams
from perdure.engine.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

_FIELDS = ("prompt", "prompt_token_ids")


def as_batch(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether one bare prompt was given."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts], True
    if not isinstance(prompts, Sequence):
        raise InvalidValue(f"prompts={prompts!r} is neither a prompt nor a list of prompts")
    if len(prompts) and not isinstance(prompts[0], (str, Mapping, Sequence)):
        return [cast(Prompt, prompts)], True
    return cast("list[Prompt]", list(prompts)), False


def token_ids_of(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[list[int], str | None]:
    """A prompt's ids, and its text if text was given. Raises `InvalidValue`."""
    if isinstance(prompt, Mapping):
        unknown = [name for name in prompt if name not in _FIELDS]
        given = [name for name in _FIELDS if prompt.get(name) is not None]
        if unknown or len(given) != 1:
            raise InvalidValue(
                f"a prompt dict holds one of {', '.join(_FIELDS)} and nothing else; got {sorted(prompt)}"
            )
        prompt = prompt[given[0]]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidValue("the prompt is text, but the model came without a tokenizer: give token ids")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidValue(f"the prompt is not valid Unicode at character {error.start}: {error.reason}") from None
        return tokenizer.encode(prompt), prompt
    if not isinstance(prompt, Sequence):
        raise InvalidValue(f"prompt={prompt!r} is neither text nor a list of token ids")
    return [_id(at, token) for at, token in enumerate(prompt)], None


def _id(at: int, token: Any) -> int:
    """An int, or what stands for one exactly, as numpy's integers do."""
    if type(token) is int:
        return token
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise InvalidValue(f"prompt_token_ids[{at}]={token!r} is not an int")
    return index(token)


def params_for(count: int, given: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """One settings object a prompt; a single one serves all."""
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [given] * count
    found = list(given)
    if len(found) != count:
        raise InvalidValue(f"sampling_params has {len(found)} entries for {count} prompts")
    for item in found:
        if not isinstance(item, SamplingParams):
            raise InvalidValue(f"sampling_params holds {item!r}, which is not a SamplingParams")
    return found


def checked_id(request_id: RequestId) -> RequestId:
    if isinstance(request_id, bool) or not isinstance(request_id, (str, int)):
        raise InvalidValue(f"request_id={request_id!r} is neither a str nor an int")
    return request_id
