"""What is asked of a server, and when: drawn from one seed, so that two servers are asked the same.

Prompts are ids where the endpoint takes ids, else words. Only lengths matter for time, and ids give them exactly; the
report has the numbers of tokens that the server itself counted.
"""

from __future__ import annotations

import csv
import datetime
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from perdure import InvalidValue

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
]
"""Each is one token of nearly every vocabulary."""

SHAREGPT_INPUT, SHAREGPT_OUTPUT = (5.1, 1.6), (4.95, 1.1)
"""Mean and deviation of the logarithms of lengths: within `SHAREGPT_RANGE` their means are about 220 and 204 tokens, as
of the first turns of ShareGPT that benchmarks commonly keep."""
SHAREGPT_RANGE = (4, 1024)
CHARACTERS_A_TOKEN = 4.0
"""Of English text, about."""
AZURE = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv"


class Planned(NamedTuple):
    """One request. at_s: when it is sent, since the beginning; None = as the rate of requests says."""

    prompt: str | list[int]
    output_len: int
    at_s: float | None = None


@dataclass(frozen=True)
class Asked:
    """As on the command line. as_ids: whether prompts may be ids, below vocab_size. limit: of prompt and output of a
    request together, as far as the server tells."""

    workload: str = "random"
    num_prompts: int = 100
    seed: int = 0
    input_len: int = 512
    output_len: int | None = None
    range_ratio: float = 0.0
    prefix_len: int = 1024
    num_prefixes: int = 1
    data: Path | None = None
    speed: float = 1.0
    as_ids: bool = True
    vocab_size: int = 500
    limit: int | None = None

    @property
    def num_new(self) -> int:
        return 128 if self.output_len is None else self.output_len


@dataclass(frozen=True)
class Traffic:
    """num_left_out: of the workload's requests, those longer than the server takes."""

    requests: list[Planned]
    num_left_out: int = 0


def planned(asked: Asked) -> Traffic:
    """The workload. Raises `InvalidValue`."""
    if asked.workload not in MAKERS:
        raise InvalidValue(f"workload={asked.workload!r} is none of {', '.join(MAKERS)}")
    requests: list[Planned] = []
    num_left_out = 0
    for one in MAKERS[asked.workload](asked, random.Random(asked.seed)):
        if asked.limit is not None and _length(one.prompt) + one.output_len > asked.limit:
            num_left_out += 1
            if num_left_out > 100 * asked.num_prompts:
                break
            continue
        requests.append(one)
        if len(requests) == asked.num_prompts:
            break
    if not requests:
        raise InvalidValue(
            f"workload {asked.workload}: no request of it fits the server's max_model_len={asked.limit}: "
            "give a smaller --input-len, --prefix-len or --output-len"
        )
    first = requests[0].at_s
    if first is not None:
        requests = [one._replace(at_s=((one.at_s or 0.0) - first) / asked.speed) for one in requests]
    return Traffic(requests, num_left_out)


def arrivals(traffic: Traffic, rate: float, seed: int) -> list[float]:
    """When each request is sent: at the trace's time, else with gaps that make a Poisson process of so many a second,
    or all at once."""
    if traffic.requests[0].at_s is not None:
        return [one.at_s or 0.0 for one in traffic.requests]
    if math.isinf(rate):
        return [0.0] * len(traffic.requests)
    draw, at, found = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in traffic.requests:
        found.append(at)
        at += draw.expovariate(rate)
    return found


def warm_up(asked: Asked, like: Planned) -> Planned:
    """One of the same length that begins otherwise, so that it leaves no prefix for the others."""
    return Planned(_prompt(asked, random.Random(f"warm-up {asked.seed}"), _length(like.prompt)), like.output_len)


def _random(asked: Asked, draw: random.Random) -> Iterator[Planned]:
    least, most = 1 - asked.range_ratio, 1 + asked.range_ratio
    while True:
        lengths = [max(1, round(mean * draw.uniform(least, most))) for mean in (asked.input_len, asked.num_new)]
        yield Planned(_prompt(asked, draw, lengths[0]), lengths[1])


def _shared_prefix(asked: Asked, draw: random.Random) -> Iterator[Planned]:
    prefixes = [_prompt(asked, draw, asked.prefix_len) for _ in range(asked.num_prefixes)]
    while True:
        for prefix in prefixes:
            tail = _prompt(asked, draw, asked.input_len)
            if isinstance(prefix, list) and isinstance(tail, list):
                yield Planned(prefix + tail, asked.num_new)
            else:
                yield Planned(f"{prefix} {tail}", asked.num_new)


def _sharegpt(asked: Asked, draw: random.Random) -> Iterator[Planned]:
    if asked.data is not None:
        yield from _conversations(asked, asked.data, draw)
        return
    while True:
        input_len, output_len = (_lognormal(draw, *shape) for shape in (SHAREGPT_INPUT, SHAREGPT_OUTPUT))
        yield Planned(_prompt(asked, draw, input_len), asked.output_len or output_len)


class Turn(msgspec.Struct, frozen=True):
    """One of ShareGPT's."""

    value: str
    role: str = msgspec.field(name="from", default="")


class Conversation(msgspec.Struct, frozen=True):
    conversations: list[Turn] = []


def _conversations(asked: Asked, path: Path, draw: random.Random) -> Iterator[Planned]:
    """The first turn of each, as text, and as many tokens as its answer has, about."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Conversation])
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidValue(f"--data={path}: not conversations in ShareGPT's form ({error})") from None
    pairs = [one.conversations[:2] for one in found if len(one.conversations) >= 2]
    pairs = [pair for pair in pairs if pair[0].value.strip() and pair[1].value.strip()]
    draw.shuffle(pairs)
    for question, answer in pairs:
        count = max(1, round(len(answer.value) / CHARACTERS_A_TOKEN))
        yield Planned(question.value, asked.output_len or count)


def _azure(asked: Asked, draw: random.Random) -> Iterator[Planned]:
    """A trace of arrivals and lengths, from its beginning on."""
    path = asked.data or Path(os.environ.get("PERDURE_DATA", "data")) / AZURE
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                input_len, output_len = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                yield Planned(_prompt(asked, draw, max(1, input_len)), max(1, asked.output_len or output_len), at)
    except (OSError, KeyError, ValueError) as error:
        columns = "TIMESTAMP, ContextTokens, GeneratedTokens"
        raise InvalidValue(f"--data={path}: not a trace with the columns {columns} ({error})") from None


Maker = Callable[[Asked, random.Random], Iterator[Planned]]

MAKERS: dict[str, Maker] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "azure": _azure,
    "shared-prefix": _shared_prefix,
}


def _prompt(asked: Asked, draw: random.Random, length: int) -> str | list[int]:
    if asked.as_ids:
        return [draw.randrange(asked.vocab_size) for _ in range(length)]
    return " ".join(draw.choices(WORDS, k=length))


def _length(prompt: str | Sequence[int]) -> int:
    """In tokens; of a text, about."""
    return round(len(prompt) / CHARACTERS_A_TOKEN) if isinstance(prompt, str) else len(prompt)


def _lognormal(draw: random.Random, mean: float, deviation: float) -> int:
    """Drawn again until it is within bounds."""
    least, most = SHAREGPT_RANGE
    while not least <= (length := round(draw.lognormvariate(mean, deviation))) <= most:
        pass
    return length
