"""Admission: defaults, then checks, then creation. A refusal raises before anything of the request exists.

What is resolved here belongs to the request from then on: its seed, its clipped budget, its stops.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.api.config import CoreConfig
from perdure.api.errors import InvalidValue, MaxSequenceLengthOverflow
from perdure.api.request import Request
from perdure.api.sampling import SamplingParams
from perdure.core.group import Group
from perdure.core.state import RequestState
from perdure.core.stopping import CursorFactory, StopRule

_MASK64 = 2**64 - 1


def admit(request: Request, arrival: int, config: CoreConfig, make_cursor: CursorFactory) -> Group:
    """The new request, waiting; its children count as arrivals one after another. Raises `InvalidValue` or
    `MaxSequenceLengthOverflow`."""
    params = request.params
    stops = stop_rules(request, _output_budget(request, config), config, make_cursor)
    seed = params.seed if params.seed is not None else derived_seed(config.seed, config.replica, arrival)
    group = Group(request, seed, params.logprobs_mode or config.logprobs_mode)
    for child, rule in enumerate(stops):
        RequestState(group, arrival + child, rule)
    return group


def stop_rules(request: Request, max_output: int, config: CoreConfig, make_cursor: CursorFactory) -> list[StopRule]:
    """What will end each child of the request, once every id it names is known to be one of this model."""
    params = request.params
    check_ids("prompt_token_ids", request.prompt_token_ids, config.vocab_size)
    check_ids("stop_token_ids", params.stop_token_ids, config.vocab_size)
    for index, sequence in enumerate(params.stop_token_sequences):
        check_ids(f"stop_token_sequences[{index}]", sequence, config.vocab_size)
    _check_other_ids(params, config.vocab_size)
    stops = [StopRule(request, config.end_token_ids, max_output, make_cursor) for _ in range(params.n)]
    _check_something_is_left(params, stops[0].masked_ids, config.vocab_size)
    return stops


def _check_other_ids(params: SamplingParams, vocab_size: int) -> None:
    for name in ("allowed_token_ids", "logprob_token_ids", "forced_token_ids"):
        check_ids(name, getattr(params, name) or (), vocab_size)
    for token, _ in params.logit_bias or ():
        if not 0 <= token < vocab_size:
            raise InvalidValue(f"logit_bias: id={token} is not a token id of this model: 0 to {vocab_size - 1}")
    for index, word in enumerate(params.bad_words or ()):
        if isinstance(word, str):
            raise InvalidValue(f"bad_words holds {word!r}, which needs a tokenizer: give lists of ids")
        check_ids(f"bad_words[{index}]", word, vocab_size)


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        at, token = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidValue(f"{field}[{at}]={token} is not a token id of this model: 0 to {vocab_size - 1}")


def _check_something_is_left(params: SamplingParams, masked_ids: Sequence[int], vocab_size: int) -> None:
    """Some id can be sampled wherever nothing but the settings decides."""
    allowed = None if params.allowed_token_ids is None else {*params.allowed_token_ids}
    banned = {word[0] for word in params.bad_words or () if len(word) == 1} | {*masked_ids}
    num_left = vocab_size - len(banned) if allowed is None else len(allowed - banned)
    if num_left:
        return
    given = {
        "min_tokens": params.min_tokens or None,
        "allowed_token_ids": params.allowed_token_ids and list(params.allowed_token_ids),
        "bad_words": params.bad_words and f"<{len(params.bad_words)} words>",
    }
    named = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    raise InvalidValue(f"{named}: all {vocab_size} ids of this model are excluded, so none could be sampled")


def _output_budget(request: Request, config: CoreConfig) -> int:
    """New tokens at most: what was asked, clipped to the room."""
    params = request.params
    length, asked, forced = len(request.prompt_token_ids), params.max_tokens, params.forced_token_ids
    if asked is None and forced is not None:
        asked = len(forced)
    if length == 0:
        raise InvalidValue("the prompt is empty: it needs at least one token")
    least_output = 0 if asked == 0 else 1
    if length + least_output > config.max_model_len:
        raise MaxSequenceLengthOverflow(
            f"the prompt has {length} tokens, max_model_len is {config.max_model_len}"
            + (", and at least one new token was asked" if length == config.max_model_len else "")
        )
    capacity = config.num_pages * config.page_size
    if length + least_output > capacity:
        raise InvalidValue(
            f"the request needs room for {length + least_output} tokens, the KV pool holds {capacity} "
            f"(num_pages={config.num_pages} of page_size={config.page_size})"
        )
    room = config.max_num_tokens - length
    if forced is not None and len(forced) > room:
        raise MaxSequenceLengthOverflow(
            f"forced_token_ids holds {len(forced)} ids, and after a prompt of {length} there is room for {room} of "
            f"{config.max_num_tokens} tokens"
        )
    return room if asked is None else min(asked, room)


def derived_seed(engine_seed: int, replica: int, arrival: int) -> int:
    """The seed of a request that has none: SplitMix64's finaliser (Steele, Lea, Flood 2014) over the three numbers."""
    state = engine_seed
    for part in (replica, arrival):
        state = (state + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state
