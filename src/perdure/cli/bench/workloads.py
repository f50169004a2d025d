"""What a benchmark runs: prompts of ids, and how many new tokens each gets. Greedy, end ids ignored, all at once.

- The same name gives the same workload on every model with the same vocabulary and limit; its digest says so.
- Ids are random, of a fixed seed: only lengths matter for time. A file gives real ones, with the ids they should give.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from perdure import InvalidValue

SEED = 0
CPU16_LENGTHS = (237, 209, 254, 124, 250, 214, 215, 124, 144, 178, 238, 247, 85, 185, 246, 140)
CPU16_NEW_TOKENS = 64
NANO_REQUESTS = 32
NANO_LENGTHS = (10, 102)
"""A tenth of what nano-vllm's benchmark draws from, for prompts and outputs alike."""
PREFIX_LENGTH, PREFIX_REQUESTS, PREFIX_NEW_TOKENS = 2000, 16, 32
PREFIX_TAILS = (8, 32)
LEAST_PREFIX = 16

Ids = Sequence[Sequence[int]]


class DataFile(msgspec.Struct, frozen=True):
    """A workload's file, also what a peer is given. generated_ids: what every right engine gives, if that is known."""

    prompt_ids: list[list[int]]
    new_tokens: int | list[int]
    generated_ids: list[list[int]] | None = None


@dataclass(frozen=True)
class Workload:
    """new_tokens: one a prompt. expected: the outputs of a right engine, if they are known."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]
    expected: list[list[int]] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_new_tokens(self) -> int:
        return sum(self.new_tokens)

    @cached_property
    def sha256(self) -> str:
        """Of what is asked; the name and what is expected do not count."""
        return digest([self.new_tokens, *self.prompts])

    def check(self, limit: int) -> Workload:
        """The workload, unless a request of it cannot run whole."""
        longest = max(len(prompt) + new for prompt, new in zip(self.prompts, self.new_tokens))
        if longest > limit:
            raise InvalidValue(
                f"workload {self.name}: its longest request takes {longest} tokens, max_model_len is {limit}"
            )
        return self

    def write(self, path: Path) -> None:
        """As a file for a peer."""
        path.write_bytes(msgspec.json.encode(DataFile(self.prompts, self.new_tokens)))


def digest(lists: Ids) -> str:
    """SHA-256 of lists of ids, as JSON without blanks."""
    return hashlib.sha256(json.dumps([list(ids) for ids in lists], separators=(",", ":")).encode()).hexdigest()


def drawn(name: str, *, vocab_size: int, limit: int) -> Workload:
    """The workload of that name for a model. limit: its longest request."""
    return MAKERS[name](random.Random(SEED), vocab_size, limit)


def check_name(name: str) -> None:
    if name not in MAKERS:
        raise InvalidValue(f"workload={name!r} is none of {', '.join(MAKERS)}")


def _cpu16(draw: random.Random, vocab_size: int, limit: int) -> Workload:
    prompts = [_ids(draw, vocab_size, length) for length in CPU16_LENGTHS]
    return Workload("cpu16", prompts, [CPU16_NEW_TOKENS] * len(prompts))


def _one(draw: random.Random, vocab_size: int, limit: int) -> Workload:
    return Workload("one", [_ids(draw, vocab_size, CPU16_LENGTHS[0])], [CPU16_NEW_TOKENS])


def _nano(draw: random.Random, vocab_size: int, limit: int) -> Workload:
    prompts = [_ids(draw, vocab_size, draw.randint(*NANO_LENGTHS)) for _ in range(NANO_REQUESTS)]
    return Workload("nano", prompts, [draw.randint(*NANO_LENGTHS) for _ in prompts])


def _prefix(draw: random.Random, vocab_size: int, limit: int) -> Workload:
    """One beginning for all, as long as the model's limit allows."""
    length = min(PREFIX_LENGTH, limit - PREFIX_TAILS[1] - PREFIX_NEW_TOKENS)
    shared = _ids(draw, vocab_size, max(length, LEAST_PREFIX))
    prompts = [shared + _ids(draw, vocab_size, draw.randint(*PREFIX_TAILS)) for _ in range(PREFIX_REQUESTS)]
    return Workload("prefix", prompts, [PREFIX_NEW_TOKENS] * len(prompts))


Maker = Callable[[random.Random, int, int], Workload]

MAKERS: dict[str, Maker] = {"cpu16": _cpu16, "nano": _nano, "prefix": _prefix, "one": _one}
FROM_DATA = ("cpu16", "one")


def _ids(draw: random.Random, vocab_size: int, count: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(count)]


def from_file(name: str, path: Path) -> Workload:
    """All prompts of a file; `one` takes its first."""
    if name not in FROM_DATA:
        raise InvalidValue(f"--data serves the workloads {' and '.join(FROM_DATA)}; {name} draws its own prompts")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=DataFile)
    except msgspec.DecodeError as error:
        raise InvalidValue(f"{path}: not a file of prompts ({error})") from None
    count = len(found.prompt_ids)
    new_tokens = [found.new_tokens] * count if isinstance(found.new_tokens, int) else found.new_tokens
    if count == 0 or len(new_tokens) != count:
        raise InvalidValue(f"{path}: {count} prompt_ids and {len(new_tokens)} new_tokens")
    if any(number < 1 for number in new_tokens) or not all(found.prompt_ids):
        raise InvalidValue(f"{path}: every prompt needs an id and a new token at least")
    kept = 1 if name == "one" else count
    expected = None if found.generated_ids is None else found.generated_ids[:kept]
    return Workload(name, found.prompt_ids[:kept], new_tokens[:kept], expected)
