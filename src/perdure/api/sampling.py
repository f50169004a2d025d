"""`SamplingParams`: what a caller may ask of one request. Frozen, checked where it is built, safe to share.

- Names and defaults are vLLM's wherever it has the feature, so that changing the import is enough.
- A value wrong by itself raises `InvalidValue` here; what depends on the model (ids, lengths) is checked at admission.
- Nothing is resolved here: a missing seed or budget stays missing until admission.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from perdure.api.errors import InvalidValue

OutputKind = Literal["final", "delta", "cumulative"]
LogprobsMode = Literal["raw", "processed"]

ALL_LOGPROBS = -1
MAX_SEED = 2**64 - 1
MAX_INTEGER = 2**63 - 1
"""Every other integer fits a signed machine word: columns, journals and the wire hold nothing larger."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one request.

    max_tokens: new tokens at most; None = up to the length limit; 0 = score the prompt only.
    min_tokens: before that many, nothing ends the request: end ids and stop ids cannot be sampled, stop strings
        and sequences do not count.
    temperature: 0 = greedy, ties to the lowest id. top_k: 0, -1 or >= vocabulary = off; ties at the border are all
        kept, except for 1. top_p in (0, 1]; min_p in [0, 1]. Order: min-tokens mask, temperature, min_p, top_k,
        renormalise, top_p over what is left.
    seed: None = derived from the engine's seed and the request's arrival. A draw depends on (seed, output position).
    stop: strings, matched in the decoded text at any token boundary; the earliest match in token order wins.
    stop_token_ids: single ids beside the model's end ids. stop_token_sequences: lists of ids over the whole output.
    ignore_eos: the model's end ids do not end it. strip_stop_tokens: drop the matched stop's ids and their scores.
    logprobs / prompt_logprobs: None = none, 0 = the chosen one, k = the k best too, -1 = the whole vocabulary.
    logprobs_mode: raw = log-softmax of the model's logits, processed = of what was drawn from; None = the engine's.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    strip_stop_tokens: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    return_prompt: bool = False
    output_kind: OutputKind | None = None
    stream_interval: int = 1
    priority: int = 0
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        self._freeze("stop", _strings("stop", self.stop))
        self._freeze("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._freeze("stop_token_sequences", _id_lists("stop_token_sequences", self.stop_token_sequences))
        _integer("max_tokens", self.max_tokens, low=0, optional=True)
        _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidValue(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        _number("temperature", self.temperature, low=0.0)
        _integer("top_k", self.top_k, low=-1)
        _number("top_p", self.top_p)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidValue(
                f"top_p={self.top_p!r} is not in (0, 1]: 1 turns the filter off, temperature=0 is greedy"
            )
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _integer("seed", self.seed, low=0, high=MAX_SEED, optional=True)
        _integer("logprobs", self.logprobs, low=ALL_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, low=ALL_LOGPROBS, optional=True)
        _choice("logprobs_mode", self.logprobs_mode, ("raw", "processed"), optional=True)
        _choice("output_kind", self.output_kind, ("final", "delta", "cumulative"), optional=True)
        _integer("stream_interval", self.stream_interval, low=1)
        _integer("priority", self.priority)
        for name in _BOOLEANS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidValue(f"{name}={value!r} is not a bool")
        if self.stop and not self.detokenize:
            raise InvalidValue(f"stop={list(self.stop)!r} needs text, but detokenize=False")

    def _freeze(self, name: str, value: tuple[Any, ...]) -> None:
        """Store the checked, immutable form of a list the caller gave (the caller's own list stays untouched)."""
        msgspec.structs.force_setattr(self, name, value)


_BOOLEANS = (
    "ignore_eos",
    "strip_stop_tokens",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "return_prompt",
    "skip_reading_prefix_cache",
)


def _integer(name: str, value: Any, *, low: int | None = None, high: int | None = None, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValue(f"{name}={value!r} is not an integer")
    high = MAX_INTEGER if high is None else high
    low = -MAX_INTEGER if low is None else low
    if value < low:
        raise InvalidValue(f"{name}={value} is below its least value {low}")
    if value > high:
        raise InvalidValue(f"{name}={value} is above its largest value {high}")


def _number(name: str, value: Any, *, low: float | None = None, high: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise InvalidValue(f"{name}={value!r} is not a finite number")
    if low is not None and value < low:
        raise InvalidValue(f"{name}={value} is below its least value {low}")
    if high is not None and value > high:
        raise InvalidValue(f"{name}={value} is above its largest value {high}")


def _choice(name: str, value: Any, allowed: tuple[str, ...], *, optional: bool = False) -> None:
    if not (value is None and optional) and value not in allowed:
        raise InvalidValue(f"{name}={value!r} is none of {', '.join(allowed)}")


def _items(name: str, value: Iterable[Any] | None) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise InvalidValue(f"{name}={value!r} is not a list")
    return tuple(value)


def _strings(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else _items(name, value)
    for item in given:
        if not isinstance(item, str) or not item:
            raise InvalidValue(f"{name} holds {item!r}, which is not a non-empty string")
        if not is_unicode(item):
            raise InvalidValue(f"{name} holds {item!r}, which is not valid Unicode")
    return given


def is_unicode(text: str) -> bool:
    """Whether a text can be written in UTF-8: it holds no lone half of a pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ids(name: str, value: Iterable[int] | None) -> tuple[int, ...]:
    given = _items(name, value)
    for item in given:
        if isinstance(item, bool) or not isinstance(item, int) or abs(item) > MAX_INTEGER:
            raise InvalidValue(f"{name} holds {item!r}, which is not a token id")
    return given


def _id_lists(name: str, value: Iterable[Iterable[int]] | None) -> tuple[tuple[int, ...], ...]:
    given = tuple(_ids(name, item) for item in _items(name, value))
    if any(not item for item in given):
        raise InvalidValue(f"{name} holds an empty sequence")
    return given
