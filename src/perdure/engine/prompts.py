"""What callers give as prompts, brought into one form. A prompt that is wrong in itself becomes its own refusal: its
error may stand in its place until it is submitted.

`[1, 2, 3]` is one prompt of ids, `[]` an empty batch, `[[]]` a batch of one empty prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api.checkpoint import Checkpoint
from perdure.api.errors import InvalidValue, shown
from perdure.api.request import Request, RequestId, check_salt, checked_id
from perdure.api.sampling import MAX_INTEGER, SamplingParams, exact_integer, is_unicode
from perdure.engine.tokenizer import Tokenizer
from perdure.runner.functions import imported

Prompt = str | Sequence[int] | Mapping[str, Any] | Checkpoint
PromptOrError = Prompt | InvalidValue

_FIELDS = ("prompt", "prompt_token_ids")
_SALT = "cache_salt"


def as_batch(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether one bare prompt was given."""
    prompts = _plain(prompts)
    if isinstance(prompts, (bytes, bytearray)):
        raise InvalidValue(f"prompts={shown(prompts)} is neither a prompt nor a list of prompts")
    if isinstance(prompts, (str, Mapping, Checkpoint)):
        return [prompts], True
    if not isinstance(prompts, Sequence):
        raise InvalidValue(f"prompts={shown(prompts)} is neither a prompt nor a list of prompts")
    if len(prompts) and not _is_prompt(prompts[0]):
        # beside prompts, what is neither a prompt nor an id is one that is wrong
        if hasattr(prompts[0], "__index__") or not any(map(_is_prompt, prompts)):
            return [cast(Prompt, prompts)], True
    return cast("list[Prompt]", list(prompts)), False


def _is_prompt(value: Any) -> bool:
    return isinstance(_plain(value), (str, Mapping, Sequence, Checkpoint))


def token_ids_of(
    prompt: Prompt, tokenizer: Tokenizer | None, add_special_tokens: bool = True
) -> tuple[list[int], str | None]:
    """A prompt's ids, and its text if text was given. Raises `InvalidValue`."""
    prompt = _plain(prompt)
    if isinstance(prompt, Checkpoint):
        raise InvalidValue("a checkpoint goes on as it began: it is no prompt to be scored")
    if isinstance(prompt, Mapping):
        unknown = [name for name in prompt if name not in (*_FIELDS, _SALT)]
        given = [name for name in _FIELDS if prompt.get(name) is not None]
        if unknown or len(given) != 1:
            known = f"one of {', '.join(_FIELDS)}, and at most {_SALT} beside it"
            raise InvalidValue(f"a prompt dict holds {known}; got {shown(list(prompt))}")
        prompt = _field(given[0], _plain(prompt[given[0]]))
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidValue("the prompt is text, but the model came without a tokenizer: give token ids")
        if not is_unicode(prompt):
            raise InvalidValue(f"prompt={shown(prompt)} is not valid Unicode")
        return tokenizer.encode(prompt, add_special_tokens), prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidValue(f"prompt={shown(prompt)} is neither text nor a list of token ids")
    return _ids(prompt), None


def _field(name: str, value: Any) -> Any:
    """What a prompt's dictionary holds under one of its keys, if the key may hold it. Raises `InvalidValue`."""
    if name == "prompt" and not isinstance(value, str):
        raise InvalidValue(f"prompt={shown(value)} is not text: ids stand under prompt_token_ids")
    if name == "prompt_token_ids" and (not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray))):
        raise InvalidValue(f"prompt_token_ids={shown(value)} is not a list of token ids")
    return value


def salt_of(prompt: Prompt) -> str | None:
    """What a prompt's cached pages are found by, beside its tokens. Raises `InvalidValue`."""
    salt = prompt.get(_SALT) if isinstance(prompt, Mapping) else None
    check_salt(salt)
    return cast("str | None", salt)


def _ids(tokens: Sequence[Any]) -> list[int]:
    """Each as `_id` has it, most as they are: a long prompt is not gone through in Python."""
    if set(map(type, tokens)) == {int} and min(tokens) >= -MAX_INTEGER and max(tokens) <= MAX_INTEGER:
        return list(tokens)
    return [_id(at, token) for at, token in enumerate(tokens)]


def _id(at: int, token: Any) -> int:
    """An int, or what stands for one exactly, as numpy's integers do."""
    found = exact_integer(token)
    if found is None:
        raise InvalidValue(f"prompt_token_ids[{at}]={shown(token)} is not an int")
    if abs(found) > MAX_INTEGER:
        raise InvalidValue(f"prompt_token_ids[{at}]={shown(token)} is no token id: ids are 0 to vocab_size - 1")
    return found


def _plain(value: Any) -> Any:
    """Arrays and tensors as the lists they hold."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_list(value: object) -> bool:
    """Whether it may hold several: a text is a sequence too, and holds none."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def params_for(
    prompts: Sequence[PromptOrError], given: SamplingParams | Sequence[SamplingParams | None] | None
) -> list[SamplingParams]:
    """One settings object a prompt; a single one serves all. A checkpoint has its own, and takes no others."""
    continues = [isinstance(prompt, Checkpoint) for prompt in prompts]
    if given is None or isinstance(given, SamplingParams):
        if given is not None and continues and all(continues):
            raise InvalidValue("sampling_params is given, but a checkpoint goes on with the settings it began with")
        found: list[SamplingParams | None] = [None if one else given or SamplingParams() for one in continues]
    elif is_list(given):
        found = list(given)
    else:
        raise InvalidValue(f"sampling_params={shown(given)} is neither a SamplingParams nor a list of them")
    if len(found) != len(prompts):
        raise InvalidValue(f"sampling_params has {len(found)} entries for {len(prompts)} prompts")
    return [_own_params(at, prompt, params) for at, (prompt, params) in enumerate(zip(prompts, found, strict=True))]


def _own_params(at: int, prompt: PromptOrError, params: SamplingParams | None) -> SamplingParams:
    if isinstance(prompt, Checkpoint):
        if params is not None:
            raise InvalidValue(f"sampling_params[{at}] is given, but a checkpoint goes on with those it began with")
        return prompt.params
    if not isinstance(params, SamplingParams):
        raise InvalidValue(f"sampling_params holds {shown(params)}, which is not a SamplingParams")
    return params


def submission(
    prompt: PromptOrError,
    params: SamplingParams,
    request_id: RequestId,
    ticket: int,
    tokenizer: Tokenizer | None,
    stream: bool,
    is_closed: bool = False,
) -> cmd.Submit:
    """What to submit for a prompt or a checkpoint; stream, is_closed: as of `Request`. Raises `InvalidValue`."""
    if isinstance(prompt, InvalidValue):
        raise prompt
    params = _settled(params, tokenizer)
    if isinstance(prompt, Checkpoint):
        return cmd.Submit(prompt.as_request(request_id, ticket, stream, is_closed=is_closed), prompt)
    token_ids, text = token_ids_of(prompt, tokenizer)
    salt = salt_of(prompt)
    return cmd.Submit(Request(request_id, ticket, token_ids, params, text, stream, salt, is_closed=is_closed))


def name_of(prompt: PromptOrError, given: RequestId | None) -> RequestId | None:
    """The id of a request: the one given, else a checkpoint's own; None = it has none yet."""
    if given is not None:
        return checked_id(given)
    return prompt.request_id if isinstance(prompt, Checkpoint) else None


def ids_to_abort(request_ids: RequestId | Sequence[RequestId]) -> list[RequestId]:
    """One id or several; each must be one that a request could have."""
    given = [request_ids] if isinstance(request_ids, (str, int)) else request_ids
    if not isinstance(given, Sequence):
        raise InvalidValue(f"request_ids={shown(request_ids)} is neither an id nor a list of ids")
    return [checked_id(one) for one in given]


def _settled(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """The settings with words as ids, and every named function found. Raises `InvalidValue`."""
    for processor in params.logits_processors:
        if isinstance(processor, str):
            imported(processor)
    words = params.bad_words
    if words is None or not any(isinstance(word, str) for word in words):
        return params
    found: list[tuple[int, ...]] = []
    for word in words:
        found += _spellings(word, tokenizer) if isinstance(word, str) else [word]
    return replace(params, bad_words=tuple(dict.fromkeys(found)))


def _spellings(word: str, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """A word's ids where a text begins and after a space; one that ends with the other says nothing new."""
    if tokenizer is None:
        raise InvalidValue(f"bad_words holds {shown(word)}, but the model came without a tokenizer: give lists of ids")
    bare = word.lstrip() or word
    at_start, inside = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}"))
    found = [at_start] if inside[-len(at_start) :] == at_start else [at_start, inside]
    return [ids for ids in found if ids]
