"""`Checkpoint`: a live request as a plain value, with all that its result will need and nothing of any device.

- It stands where a prompt stands: submitted to the same engine, to another one or in another process, it goes on, and
  its result is that of the undisturbed run.
- A request is taken whole: with n > 1 all its samples are in it, those that have ended too.
- What belongs to a position is packed, by column: 4 bytes a token, and what its scores take.
- Everything that admission resolved (seed, budget, kind of scores) belongs to it and is not resolved again.
- Nothing in it is shared with the live request, and nobody can change it.
"""

from __future__ import annotations

import hashlib
from array import array
from itertools import pairwise
from typing import Any, Literal, get_type_hints

import msgspec

from perdure.api.ending import Ending
from perdure.api.errors import InvalidValue
from perdure.api.fingerprint import Fingerprint
from perdure.api.moment import RequestEvent
from perdure.api.request import Request, RequestId, check_salt, checked_id
from perdure.api.sampling import MAX_INTEGER, MAX_SEED, LogprobsMode, SamplingParams, is_unicode
from perdure.api.scores import PackedScores

MAGIC = b"perdure checkpoint"
VERSION = 4
"""Of the file's format. It grows with every change of a field; other versions are refused, never guessed at."""

_VERSION_BYTES, _DIGEST_BYTES = 2, 16


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """What happened to a request so far, in seconds since its arrival, without the time it lay as a checkpoint."""

    elapsed_s: float = 0.0
    events: tuple[RequestEvent, ...] = ()


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One output of the request, as far as it is. ending: how it ended, None = it goes on.

    tokens: int32, little-endian. exact: False if it crossed unequal fingerprints before. epochs: of the weights it
    comes from, pairs (first output index, epoch).
    """

    tokens: bytes = b""
    scores: PackedScores | None = None
    exact: bool = True
    num_pauses: int = 0
    num_evictions: int = 0
    epochs: tuple[tuple[int, int], ...] = ()
    ending: Ending | None = None

    def __post_init__(self) -> None:
        _check_kinds(self)
        _check_count("num_pauses", self.num_pauses)
        _check_count("num_evictions", self.num_evictions)

    @property
    def num_output(self) -> int:
        return len(self.tokens) // 4

    @property
    def token_ids(self) -> list[int]:
        return array("i", self.tokens).tolist()

    def check(self, params: SamplingParams, max_output: int) -> None:
        """Raises `InvalidValue` for what no request of these settings has."""
        count = self.num_output
        if len(self.tokens) % 4:
            raise InvalidValue(f"an output of {len(self.tokens)} bytes is not one of tokens")
        if self.ending is None and count >= max(max_output, 1):
            raise InvalidValue(f"max_output={max_output} does not fit an unfinished output of {count}")
        if count > max_output:
            raise InvalidValue(f"max_output={max_output} does not fit an output of {count}")
        firsts = [first for first, _ in self.epochs]
        if firsts[:1] != [0] * bool(count) or not all(a < b for a, b in pairwise([*firsts, count])):
            raise InvalidValue(f"epochs={list(self.epochs)} do not fit {count} output tokens")
        _check_scores("scores", self.scores, params.asks_scores, count, count)
        if self.scores is not None and self.scores.num_listed != count * len(params.logprob_token_ids or ()):
            num_listed = count * len(params.logprob_token_ids or ())
            raise InvalidValue(f"scores hold {self.scores.num_listed} listed ids, {num_listed} were asked")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """status: what the request was when this was taken, as its furthest sample. prompt: its text, if it was given as
    text.

    prompt_tokens: int32, little-endian. max_output: the budget of each sample as clipped at first admission.
    samples: in the order of their index. prompt_scores: as far as the prompt was computed. logprobs_mode: as resolved.
    fingerprint: of the engine that took this. num_checkpoints: how many it has gone on from, with this one.
    timing: filled in by the engine.
    """

    request_id: RequestId
    status: Literal["waiting", "running", "paused"]
    params: SamplingParams
    prompt: str | None
    prompt_tokens: bytes
    max_output: int
    seed: int
    logprobs_mode: LogprobsMode
    samples: tuple[Sample, ...]
    prompt_scores: PackedScores | None
    fingerprint: Fingerprint
    num_cached_tokens: int
    num_checkpoints: int
    timing: Timing = Timing()
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _check_kinds(self)
        checked_id(self.request_id)
        if self.prompt is not None and not is_unicode(self.prompt):
            raise InvalidValue(f"prompt={self.prompt!r} is not valid Unicode")
        check_salt(self.cache_salt)
        if len(self.prompt_tokens) % 4 or not self.prompt_tokens:
            raise InvalidValue(f"prompt_tokens of {len(self.prompt_tokens)} bytes are no prompt")
        if not 0 <= self.max_output <= MAX_INTEGER:
            raise InvalidValue(f"max_output={self.max_output} is out of range: 0 to {MAX_INTEGER}")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidValue(f"seed={self.seed} is out of range: 0 to {MAX_SEED}")
        if not 0 <= self.num_cached_tokens < self.prompt_length:
            raise InvalidValue(
                f"num_cached_tokens={self.num_cached_tokens} does not fit a prompt of {self.prompt_length} tokens, the "
                "last of which is always computed"
            )
        _check_count("num_checkpoints", self.num_checkpoints)
        if len(self.samples) != self.params.n:
            raise InvalidValue(f"the checkpoint holds {len(self.samples)} samples of a request with n={self.params.n}")
        for sample in self.samples:
            sample.check(self.params, self.max_output)
        if all(sample.ending is not None for sample in self.samples):
            raise InvalidValue("all samples of the checkpoint have ended: nothing is left to go on")
        most = self.prompt_length - 1
        least = most if self.num_output else 0
        _check_scores("prompt_scores", self.prompt_scores, self.params.prompt_logprobs is not None, least, most)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_tokens) // 4

    @property
    def num_output(self) -> int:
        """Output tokens so far, of all samples."""
        return sum(sample.num_output for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_length + self.num_output

    @property
    def num_remaining(self) -> int:
        """New tokens it may still have."""
        return sum(self.max_output - sample.num_output for sample in self.samples if sample.ending is None)

    @property
    def prompt_token_ids(self) -> list[int]:
        return array("i", self.prompt_tokens).tolist()

    @property
    def token_ids(self) -> list[int]:
        """The output so far, of the first sample."""
        return self.samples[0].token_ids

    @property
    def exact(self) -> bool:
        return all(sample.exact for sample in self.samples)

    def as_request(
        self, request_id: RequestId, ticket: int, stream: bool, routed: bool = False, is_closed: bool = False
    ) -> Request:
        """The request it was taken of, submitted anew."""
        salt = self.cache_salt
        ids = self.prompt_token_ids
        return Request(request_id, ticket, ids, self.params, self.prompt, stream, salt, routed, is_closed)

    def to_bytes(self) -> bytes:
        """The file form; `from_bytes` gives an equal value back."""
        body = msgspec.msgpack.encode(self)
        return MAGIC + VERSION.to_bytes(_VERSION_BYTES, "little") + _digest(body) + body

    @staticmethod
    def from_bytes(data: bytes) -> Checkpoint:
        """Raises `InvalidValue` for what is no checkpoint, of another version, cut short or damaged."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InvalidValue(f"a checkpoint is bytes, not {type(data).__name__}")
        data = bytes(data)
        head, data = data[: len(MAGIC)], data[len(MAGIC) :]
        if not MAGIC.startswith(head) or not head:
            raise InvalidValue(f"not a checkpoint of perdure: it begins with {head!r}")
        if len(data) < _VERSION_BYTES:
            raise InvalidValue(f"the checkpoint is cut short: {len(head) + len(data)} bytes end before its version")
        version = int.from_bytes(data[:_VERSION_BYTES], "little")
        if version != VERSION:
            raise InvalidValue(f"the checkpoint has format version {version}, and only version {VERSION} can be read")
        digest, body = data[_VERSION_BYTES:][:_DIGEST_BYTES], data[_VERSION_BYTES + _DIGEST_BYTES :]
        if digest != _digest(body):
            raise InvalidValue(f"the checkpoint is damaged or cut short: {len(body)} bytes do not match their digest")
        try:
            return msgspec.msgpack.decode(body, type=Checkpoint)
        except msgspec.MsgspecError as error:
            raise InvalidValue(f"the checkpoint holds what no checkpoint can: {error}") from None


_KINDS: dict[type, dict[str, Any]] = {
    cls: {name: kind for name, kind in get_type_hints(cls).items() if name in cls.__struct_fields__}
    for cls in (Sample, Checkpoint)
}
"""Fields by type. Only a checkpoint that was decoded is of these types by itself."""


def _check_kinds(whole: Sample | Checkpoint) -> None:
    for name, kind in _KINDS[type(whole)].items():
        value = getattr(whole, name)
        try:
            found = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise InvalidValue(f"{name}={value!r} is not what a checkpoint holds there: {error}") from None
        if type(found) is not type(value) or found != value:
            raise InvalidValue(f"{name}={value!r} is not what a checkpoint holds there: {type(found).__name__} is")


def _check_count(name: str, value: int) -> None:
    if not 0 <= value <= MAX_INTEGER:
        raise InvalidValue(f"{name}={value} is out of range: 0 to {MAX_INTEGER}")


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _check_scores(name: str, scores: PackedScores | None, asked: bool, least: int, most: int) -> None:
    if (scores is not None) != asked:
        raise InvalidValue(f"{name} is {'missing' if scores is None else 'there'}, and params ask otherwise")
    if scores is not None and not least <= scores.num_scored <= most:
        raise InvalidValue(f"{name} holds {scores.num_scored} entries: {least} to {most} belong to these tokens")
