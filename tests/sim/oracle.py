"""The one-request oracle: what a request must give, computed alone, without pages, plans, chunks or steps.

Written the slow, obvious way and from the rules, not from the core: stops are searched in the whole output each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from perdure.api.config import CoreConfig
from perdure.api.plan import Adjustments, RowInit
from perdure.api.request import Request
from perdure.runner import fake

PIECES = ("a", "b", "c", "ab", "bc", "d", "ca", "e", "da", "f", "abc", "g")
"""Text of token ids in the simulation; some stops cross tokens, some lie inside one."""


@dataclass
class Expected:
    token_ids: list[int] = field(default_factory=list)
    reason: str = "length"
    stop: tuple[object, ...] | None = None
    listed: list[float] = field(default_factory=list)
    scores: list[tuple[float, list[int], list[float]]] = field(default_factory=list)
    prompt_scores: list[tuple[float, list[int], list[float]]] = field(default_factory=list)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(PIECES[token % len(PIECES)] for token in token_ids)


def expected(
    request: Request,
    seed: int,
    config: CoreConfig,
    weights_at: Callable[[int], int] = lambda index: 0,
    child: int = 0,
) -> Expected:
    """Of one child, computed as if it were the only one. weights_at(output index): the weights that draw this token;
    the prompt's scores are of those at 0."""
    params, prompt = request.params, request.prompt_token_ids
    room = min(config.max_model_len, config.num_pages * config.page_size) - len(prompt)
    forced = params.forced_token_ids or ()
    asked = params.max_tokens if params.max_tokens is not None or not forced else len(forced)
    budget = room if asked is None else min(asked, room)
    is_structured = params.structured_outputs is not None
    end_ids = () if params.ignore_eos and not is_structured else config.end_token_ids
    settings = RowInit(
        slot=0,
        request=0,
        prompt_length=len(prompt),
        temperature=params.temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        min_tokens=params.min_tokens,
        masked_ids=(*params.stop_token_ids, *(token for token in end_ids if token not in params.stop_token_ids)),
        num_logprobs=0,
        num_prompt_logprobs=0,
        processed_logprobs=False,
        adjustments=Adjustments(
            repetition_penalty=params.repetition_penalty,
            functions=params.logits_processors,
            structure=params.structured_outputs,
        ),
        forced_ids=params.forced_token_ids or (),
        child=child,
    )
    result = Expected()
    contents = _contents(prompt, weights_at(0))
    if params.prompt_logprobs is not None:
        for before, token in zip(contents[1:], prompt[1:]):
            result.prompt_scores.append(_scored(before, token, params.prompt_logprobs, config))
    output = result.token_ids
    for index in range(budget):
        weights = weights_at(index)
        if index and weights != weights_at(index - 1):
            contents = _contents(prompt + output, weights)
        known = sum(contents[1:]) % 2**64 & (2**63 - 1)
        drawn_from = fake.look_back(known, settings, prompt + output)
        token = fake.draw(drawn_from, seed, index, settings, config.vocab_size)
        output.append(token)
        contents.append(fake.chain(contents[-1], token, weights))
        if params.asks_scores:
            result.scores.append(_scored(known, token, params.logprobs or 0, config))
        result.listed += [fake.score(known, id_) for id_ in params.logprob_token_ids or ()]
        result.stop = _stop(output, request, end_ids)
        if result.stop is not None:
            result.reason = "stop"
            break
    return result


def _contents(tokens: list[int], weights: int) -> list[int]:
    """What each position holds, after a first number that belongs to none."""
    contents = [1]
    for token in tokens:
        contents.append(fake.chain(contents[-1], token, weights))
    return contents


def _scored(content: int, token: int, count: int, config: CoreConfig) -> tuple[float, list[int], list[float]]:
    return fake.score(content, token), *fake.top(content, token, count, config.vocab_size)


def _stop(output: list[int], request: Request, end_ids: tuple[int, ...]) -> tuple[object, ...] | None:
    """(reason, tokens up to the stop, tokens of the match, where the text is cut), if the last token completes one."""
    params, count = request.params, len(output)
    if count <= len(params.forced_token_ids or ()):
        return None
    if count > params.min_tokens and output[-1] in end_ids:
        return None, count, 1, None
    if count > params.min_tokens and output[-1] in params.stop_token_ids:
        return output[-1], count, 1, None
    if count < params.min_tokens:
        return None
    sequences = [s for s in params.stop_token_sequences if tuple(output[-len(s) :]) == s]
    if sequences:
        longest = max(sequences, key=len)
        return longest, count, len(longest), None
    before, text = len(text_of(output[:-1])), text_of(output)
    ends = [
        (end, end - len(stop), stop)
        for stop in params.stop
        for end in range(before + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    if ends:
        _, begin, stop = min(ends)
        matched = sum(len(text_of(output[:i])) >= begin for i in range(count))
        return stop, count, matched, begin
    return None
