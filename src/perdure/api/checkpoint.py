"""`Checkpoint`: a live request as a plain value, with all that its result will need and nothing of any device.

- It stands where a prompt stands: submitted to the same engine, to another one or in another process, it goes on, and
  its result is that of the undisturbed run.
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

from perdure.api.errors import InvalidValue
from perdure.api.fingerprint import Fingerprint
from perdure.api.moment import RequestEvent
from perdure.api.request import Request, RequestId, check_salt, checked_id
from perdure.api.sampling import MAX_INTEGER, MAX_SEED, LogprobsMode, SamplingParams, is_unicode
from perdure.api.scores import PackedScores

MAGIC = b"perdure checkpoint"
VERSION = 3
"""Of the file's format. It grows with every change of a field; other versions are refused, never guessed at."""

_VERSION_BYTES, _DIGEST_BYTES = 2, 16


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """What happened to a request so far, in seconds since its arrival, without the time it lay as a checkpoint."""

    elapsed_s: float = 0.0
    events: tuple[RequestEvent, ...] = ()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """status: what the request was when this was taken. prompt: its text, if it was given as text.

    tokens: prompt and output, int32, little-endian. max_output: the budget as clipped at first admission.
    scores, prompt_scores: of the output, and of the prompt as far as it was computed. logprobs_mode: as resolved.
    fingerprint: of the engine that took this. exact: False if it crossed unequal ones before.
    num_checkpoints: how many it has gone on from, with this one. epochs: of the weights its output comes from, pairs
    (first output index, epoch). timing: filled in by the engine.
    """

    request_id: RequestId
    status: Literal["waiting", "running", "paused"]
    params: SamplingParams
    prompt: str | None
    prompt_length: int
    max_output: int
    seed: int
    logprobs_mode: LogprobsMode
    tokens: bytes
    scores: PackedScores | None
    prompt_scores: PackedScores | None
    fingerprint: Fingerprint
    exact: bool
    num_cached_tokens: int
    num_pauses: int
    num_evictions: int
    num_checkpoints: int
    epochs: tuple[tuple[int, int], ...] = ()
    timing: Timing = Timing()
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            _check_kind(name, getattr(self, name), kind)
        checked_id(self.request_id)
        if self.prompt is not None and not is_unicode(self.prompt):
            raise InvalidValue(f"prompt={self.prompt!r} is not valid Unicode")
        check_salt(self.cache_salt)
        if len(self.tokens) % 4 or not 1 <= self.prompt_length <= self.num_tokens:
            raise InvalidValue(f"prompt_length={self.prompt_length} does not fit tokens of {len(self.tokens)} bytes")
        if not (0 <= self.max_output <= MAX_INTEGER and self.num_output < max(self.max_output, 1)):
            raise InvalidValue(f"max_output={self.max_output} does not fit an unfinished output of {self.num_output}")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidValue(f"seed={self.seed} is out of range: 0 to {MAX_SEED}")
        if not 0 <= self.num_cached_tokens < self.prompt_length:
            raise InvalidValue(
                f"num_cached_tokens={self.num_cached_tokens} does not fit a prompt of {self.prompt_length} tokens, the "
                "last of which is always computed"
            )
        for name in ("num_pauses", "num_evictions", "num_checkpoints"):
            if not 0 <= getattr(self, name) <= MAX_INTEGER:
                raise InvalidValue(f"{name}={getattr(self, name)} is out of range: 0 to {MAX_INTEGER}")
        firsts = [first for first, _ in self.epochs]
        if firsts[:1] != [0] * bool(self.num_output) or not all(a < b for a, b in pairwise([*firsts, self.num_output])):
            raise InvalidValue(f"epochs={list(self.epochs)} do not fit {self.num_output} output tokens")
        _check_scores("scores", self.scores, self.params.asks_scores, self.num_output, self.num_output)
        if self.scores is not None:
            num_listed = self.num_output * len(self.params.logprob_token_ids or ())
            if self.scores.num_listed != num_listed:
                raise InvalidValue(f"scores hold {self.scores.num_listed} listed ids, {num_listed} were asked")
        most = self.prompt_length - 1
        least = most if self.num_output else 0
        _check_scores("prompt_scores", self.prompt_scores, self.params.prompt_logprobs is not None, least, most)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.tokens) // 4

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_length

    @property
    def num_remaining(self) -> int:
        """New tokens it may still have."""
        return self.max_output - self.num_output

    @property
    def prompt_token_ids(self) -> list[int]:
        return array("i", self.tokens[: 4 * self.prompt_length]).tolist()

    @property
    def token_ids(self) -> list[int]:
        """The output so far."""
        return array("i", self.tokens[4 * self.prompt_length :]).tolist()

    def as_request(self, request_id: RequestId, ticket: int, stream: bool) -> Request:
        """The request it was taken of, submitted anew."""
        return Request(request_id, ticket, self.prompt_token_ids, self.params, self.prompt, stream, self.cache_salt)

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


_KINDS: dict[str, Any] = {
    name: kind for name, kind in get_type_hints(Checkpoint).items() if name in Checkpoint.__struct_fields__
}
"""Fields by type. Only a checkpoint that was decoded is of these types by itself."""


def _check_kind(name: str, value: object, kind: Any) -> None:
    try:
        found = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"{name}={value!r} is not what a checkpoint holds there: {error}") from None
    if type(found) is not type(value):
        raise InvalidValue(f"{name}={value!r} is not what a checkpoint holds there: {type(found).__name__} is")


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _check_scores(name: str, scores: PackedScores | None, asked: bool, least: int, most: int) -> None:
    if (scores is not None) != asked:
        raise InvalidValue(f"{name} is {'missing' if scores is None else 'there'}, and params ask otherwise")
    if scores is not None and not least <= scores.num_scored <= most:
        raise InvalidValue(f"{name} holds {scores.num_scored} entries: {least} to {most} belong to these tokens")
