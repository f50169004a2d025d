"""`SamplingParams`: what a caller may ask of one request. Frozen, checked where it is built, safe to share.

- Names and defaults are vLLM's wherever it has the feature, so that changing the import is enough.
- Numbers and lists of numpy's and torch's kinds are taken, and kept as plain ones.
- A value wrong by itself raises `InvalidValue` here; what depends on the model (ids, lengths) is checked at admission.
- Nothing is resolved here: a missing seed or budget stays missing until admission.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from operator import index
from typing import Any, Literal

import msgspec

from perdure.api.errors import InvalidValue, shown
from perdure.api.structured import StructuredOutputsParams, structured

OutputKind = Literal["final", "delta", "cumulative"]
LogprobsMode = Literal["raw", "processed"]

ALL_LOGPROBS = -1
MAX_SEED = 2**64 - 1
MAX_INTEGER = 2**63 - 1
"""Every other integer fits a signed machine word: columns, journals and the wire hold nothing larger."""
MAX_SAMPLES = 2**14
"""Of one prompt: vLLM's limit."""
MAX_PENALTY = 2.0
MAX_REPETITION = 1e6
"""And its inverse the least: beyond, a logit is lost to fp32."""
MAX_BIAS = 1e30
"""Beyond any logit, and far from the end of fp32."""

HELD = "held:"
"""How the names of functions begin that are no `module:function`: held by one process for one request."""

LogitsProcessor = Callable[..., Any]
"""f(output_ids, logits) or f(prompt_ids, output_ids, logits): gives logits of the same shape, which may be the tensor
it got, changed in place."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one request.

    n: samples of the one prompt. Child i draws from (seed, i), child 0 is what n=1 gives.
    max_tokens: new tokens at most; None = up to the length limit; 0 = score the prompt only.
    min_tokens: before that many, nothing ends the request: end ids and stop ids cannot be sampled, stop strings
        and sequences do not count.
    temperature: 0 = greedy, ties to the lowest id. top_k: 0, -1 or >= vocabulary = off; ties at the border are all
        kept, except for 1. top_p in (0, 1]; min_p in [0, 1].
    repetition_penalty: 1e-6 to 1e6, 1 = off; counts prompt and output. presence_penalty, frequency_penalty: -2 to 2,
        0 = off; count the output only.
    logit_bias: {id: added to its logit}; ids may be strings of digits. allowed_token_ids: nothing else is sampled.
    bad_words: texts or lists of ids that the output never completes, even where the prompt began them.
    logits_processors: functions, or `module:function`, called with (output ids, logits) or (prompt ids, output ids,
        logits); they see the model's logits before everything else.
    Order: logits processors; logit bias, allowed ids, structured outputs and bad words; penalties; min-tokens mask;
        temperature; min_p; top_k; renormalise; top_p over what is left.
    seed: None = derived from the engine's seed and the request's arrival. A draw depends on (seed, child, output
        position).
    stop: strings, matched in the decoded text at any token boundary; the earliest match in token order wins.
    stop_token_ids: single ids beside the model's end ids. stop_token_sequences: lists of ids over the whole output.
    ignore_eos: the model's end ids do not end it. strip_stop_tokens: drop the matched stop's ids and their scores.
        include_stop_str_in_output: the text keeps the string that ended it.
    logprobs / prompt_logprobs: None = none, 0 = the chosen one, k = the k best too, -1 = the whole vocabulary.
    logprobs_mode: raw = log-softmax of the model's logits, processed = of what was drawn from; None = the engine's.
    logprob_token_ids: these ids' scores at each output position, beside the others.
    forced_token_ids: the output begins with these, scored as if they had been drawn; stops in them are ignored.
        max_tokens=None then means these and no more.
    structured_outputs: the output is JSON of a schema, matches a pattern, is one of some texts or follows a grammar; a
        `StructuredOutputsParams` or its fields as a dictionary. It ends with an end id where it is complete, whatever
        ignore_eos says. Not together with forced_token_ids.
    detokenize: the output has text. skip_special_tokens: without special tokens in it. return_prompt: the result holds
        the prompt and its ids.
    output_kind: one result at the end ("final"), new tokens as they come ("delta"), or all until then ("cumulative");
        None = final, and delta when streaming. stream_interval: new tokens that a part has, at least.
    priority: lower first, then arrival. It decides whose prompt is computed, also before one that was begun, and who is
        put aside when memory runs out; whoever decodes goes on.
    skip_reading_prefix_cache: all of the prompt is computed.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] | None = None
    logits_processors: tuple[Any, ...] = ()
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
    logprob_token_ids: tuple[int, ...] | None = None
    forced_token_ids: tuple[int, ...] | None = None
    structured_outputs: StructuredOutputsParams | None = None
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
        self._freeze("logit_bias", _bias(self.logit_bias))
        for name in ("allowed_token_ids", "logprob_token_ids", "forced_token_ids"):
            given = getattr(self, name)
            self._freeze(name, None if given is None else _ids(name, given, ordered=name == "forced_token_ids"))
        self._freeze("bad_words", _words(self.bad_words))
        self._freeze("logits_processors", _processors(self.logits_processors))
        self._integer("n", low=1, high=MAX_SAMPLES)
        msgspec.structs.force_setattr(self, "structured_outputs", structured(self.structured_outputs))
        self._integer("max_tokens", low=0, optional=True)
        most, limit = self.max_tokens, f"max_tokens={self.max_tokens}"
        if most is None and self.forced_token_ids is not None:
            most = len(self.forced_token_ids)
            limit = f"the {most} ids of forced_token_ids, with which it ends"
        if most == 0 and self.n > 1:
            raise InvalidValue(f"n={self.n} asks for several outputs, and {limit} for none")
        self._integer("min_tokens", low=0)
        if most is not None and self.min_tokens > most:
            raise InvalidValue(f"min_tokens={self.min_tokens} is more than {limit}")
        self._number("temperature", low=0.0)
        self._integer("top_k", low=-1)
        self._number("top_p")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidValue(
                f"top_p={shown(self.top_p)} is not in (0, 1]: 1 turns the filter off, temperature=0 is greedy"
            )
        self._number("min_p", low=0.0, high=1.0)
        self._number("repetition_penalty", low=1 / MAX_REPETITION, high=MAX_REPETITION)
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, low=-MAX_PENALTY, high=MAX_PENALTY)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidValue("allowed_token_ids=[] leaves nothing to sample: None allows every id")
        if self.forced_token_ids is not None and self.max_tokens is not None:
            if len(self.forced_token_ids) > self.max_tokens:
                raise InvalidValue(
                    f"forced_token_ids holds {len(self.forced_token_ids)} ids, more than max_tokens={self.max_tokens}"
                )
        if self.forced_token_ids is not None and self.structured_outputs is not None:
            raise InvalidValue("structured_outputs and forced_token_ids both say what the output is: give one of them")
        self._integer("seed", low=0, high=MAX_SEED, optional=True)
        self._integer("logprobs", low=ALL_LOGPROBS, optional=True)
        self._integer("prompt_logprobs", low=ALL_LOGPROBS, optional=True)
        _choice("logprobs_mode", self.logprobs_mode, ("raw", "processed"), optional=True)
        _choice("output_kind", self.output_kind, ("final", "delta", "cumulative"), optional=True)
        self._integer("stream_interval", low=1)
        self._integer("priority")
        for name in _BOOLEANS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidValue(f"{name}={shown(value)} is not a bool")
        if self.stop and not self.detokenize:
            raise InvalidValue(f"stop={list(self.stop)!r} needs text, but detokenize=False")

    @property
    def asks_scores(self) -> bool:
        """Whether each output token gets an entry of scores."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def _integer(self, name: str, **limits: Any) -> None:
        self._freeze(name, _integer(name, getattr(self, name), **limits))

    def _number(self, name: str, **limits: Any) -> None:
        self._freeze(name, _number(name, getattr(self, name), **limits))

    def _freeze(self, name: str, value: Any) -> None:
        """Store the checked, plain and immutable form of what the caller gave, which stays untouched."""
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


def _integer(
    name: str, value: Any, *, low: int | None = None, high: int | None = None, optional: bool = False
) -> int | None:
    if value is None and optional:
        return None
    found = exact_integer(value)
    if found is None:
        raise InvalidValue(f"{name}={shown(value)} is not an integer")
    _check_bounds(name, found, -MAX_INTEGER if low is None else low, MAX_INTEGER if high is None else high)
    return found


def exact_integer(value: Any) -> int | None:
    """An int, or what stands for one exactly, as numpy's integers do. None: it is neither, and no bool is."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def _number(name: str, value: Any, *, low: float | None = None, high: float | None = None) -> float:
    found = None if isinstance(value, bool) or not isinstance(value, Real) else _plain_number(value)
    if found is None or not abs(found) <= sys.float_info.max:
        raise InvalidValue(f"{name}={shown(value)} is not a finite number")
    _check_bounds(name, found, low, high)
    return found


def _plain_number(value: Any) -> float | None:
    """None: too large for one."""
    try:
        return value if type(value) is int else float(value)
    except OverflowError:
        return None


def _check_bounds(name: str, value: Any, low: float | None, high: float | None) -> None:
    if low is not None and value < low:
        raise InvalidValue(f"{name}={shown(value)} is below its least value {low}")
    if high is not None and value > high:
        raise InvalidValue(f"{name}={shown(value)} is above its largest value {high}")


def _choice(name: str, value: Any, allowed: tuple[str, ...], *, optional: bool = False) -> None:
    if not (value is None and optional) and value not in allowed:
        raise InvalidValue(f"{name}={shown(value)} is none of {', '.join(allowed)}")


def _items(name: str, value: Any, ordered: bool = False) -> tuple[Any, ...]:
    """Of a list, or of an array or a tensor, as the plain values it holds. ordered: a set will not do."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, Mapping)):
        raise InvalidValue(f"{name}={shown(value)} is not a list")
    if ordered and isinstance(value, (set, frozenset)):
        raise InvalidValue(f"{name}={shown(value)} is a set, which has no order")
    return tuple(value)


def _strings(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else _items(name, value)
    for item in given:
        if not isinstance(item, str) or not item:
            raise InvalidValue(f"{name} holds {shown(item)}, which is not a non-empty string")
        if not is_unicode(item):
            raise InvalidValue(f"{name} holds {shown(item)}, which is not valid Unicode")
    return given


def is_unicode(text: str) -> bool:
    """Whether a text can be written in UTF-8: it holds no lone half of a pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ids(name: str, value: Any, ordered: bool = False) -> tuple[int, ...]:
    return tuple(_id(name, item) for item in _items(name, value, ordered))


def _id(name: str, value: Any) -> int:
    found = exact_integer(value)
    if found is None or abs(found) > MAX_INTEGER:
        raise InvalidValue(f"{name} holds {shown(value)}, which is not a token id: ids are 0 to vocab_size - 1")
    return found


def _id_lists(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(_id_list(name, item) for item in _items(name, value))


def _id_list(name: str, value: Any) -> tuple[int, ...]:
    """One of several lists: a sequence that stops, or a word."""
    if value is None or (isinstance(value, (str, bytes)) or not isinstance(value, Iterable)):
        raise InvalidValue(f"{name} holds {shown(value)}, which is not a list of token ids")
    found = _ids(name, value, ordered=True)
    if not found:
        raise InvalidValue(f"{name} holds an empty sequence")
    return found


def _bias(given: Any) -> tuple[tuple[int, float], ...] | None:
    """Pairs (id, bias), ascending by id."""
    if given is None:
        return None
    found: dict[int, float] = {}
    for pair in given.items() if isinstance(given, Mapping) else _items("logit_bias", given):
        try:
            key, value = pair
        except (TypeError, ValueError):
            raise InvalidValue(f"logit_bias={shown(given)} is not a dictionary of token ids") from None
        is_digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
        token = _id("logit_bias", int(key) if is_digits else key)
        if token in found:
            raise InvalidValue(f"logit_bias names the id {token} twice")
        found[token] = float(_number(f"logit_bias[{token}]", value, low=-MAX_BIAS, high=MAX_BIAS))
    return tuple(sorted(found.items()))


def _words(given: Any) -> tuple[str | tuple[int, ...], ...] | None:
    if given is None:
        return None
    items = _items("bad_words", given)
    return tuple(
        _strings("bad_words", [one])[0] if isinstance(one, str) else _id_list("bad_words", one) for one in items
    )


def _processors(given: Any) -> tuple[Any, ...]:
    items = (given,) if callable(given) or isinstance(given, str) else _items("logits_processors", given)
    for one in items:
        module, colon, function = one.partition(":") if isinstance(one, str) else ("", "", "")
        if not callable(one) and not (module and colon and function):
            raise InvalidValue(
                f"logits_processors holds {shown(one)}, which is neither a function nor 'module:function'"
            )
    return items
