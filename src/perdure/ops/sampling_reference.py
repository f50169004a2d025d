"""The slow obvious forms of sampling and scoring, one row at a time in float64: oracles of `sampling`.

- Each follows the documented sentence, sorting whole rows and using Python where it reads better.
- `draw` alone works in fp32, since the order of its roundings is what it defines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


def log_softmax(x: Iterable[float]) -> Doubles:
    values = np.array(list(x), np.float64)
    shifted = values - values.max()
    result: Doubles = shifted - math.log(np.exp(shifted).sum())
    return result


def order(x: Doubles) -> list[int]:
    """Ids by (value descending, id ascending)."""
    return sorted(range(len(x)), key=lambda id_: (-x[id_], id_))


def adjusted(
    logits: Iterable[float],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Iterable[int] | None = None,
    bad_words: Iterable[Sequence[int]] = (),
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_tokens: int = 0,
    masked_ids: Iterable[int] = (),
) -> Doubles:
    """The logits that temperature is applied to, from the whole history: one sentence of the rules after another."""
    x = np.array(list(logits), np.float64)
    for id_, bias in (logit_bias or {}).items():
        x[id_] += bias
    if allowed_token_ids is not None:
        allowed = {*allowed_token_ids}
        x[[id_ for id_ in range(len(x)) if id_ not in allowed]] = -math.inf
    history = [*prompt, *output]
    for word in bad_words:
        if len(word) <= len(history) + 1 and history[len(history) + 1 - len(word) :] == [*word[:-1]]:
            x[word[-1]] = -math.inf
    for id_ in {*history}:
        x[id_] = x[id_] / repetition_penalty if x[id_] > 0 else x[id_] * repetition_penalty
    for id_ in {*output}:
        x[id_] -= frequency_penalty * output.count(id_) + presence_penalty
    if len(output) < min_tokens:
        x[list(masked_ids)] = -math.inf
    return x


def kept_ids(
    logits: Iterable[float],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    """Ids that may be drawn, ascending: temperature, min_p, top_k, renormalise, top_p over what is left."""
    x = np.array(list(logits), np.float64)
    if temperature == 0.0 or top_k == 1:
        return [order(x)[0]]
    x = (x - x.max()) / temperature
    p = np.exp(log_softmax(x))
    keep = [id_ for id_ in range(len(x)) if p[id_] >= min_p * p.max() and x[id_] > -math.inf]
    if 0 < top_k < len(x):
        border = x[order(x)[top_k - 1]]
        keep = [id_ for id_ in keep if x[id_] >= border]
    if top_p < 1.0:
        total = p[keep].sum()
        left = set(keep)
        nucleus: list[int] = []
        for id_ in (id_ for id_ in order(x) if id_ in left):
            nucleus.append(id_)
            if p[nucleus].sum() >= top_p * total:
                break
        keep = nucleus
    return sorted(keep)


def processed(logits: Iterable[float], **settings: float) -> Doubles:
    """Log-probabilities of what is drawn from: log-softmax over the kept ids of the scaled logits, -inf elsewhere."""
    x = np.array(list(logits), np.float64)
    keep = kept_ids(x, **settings)  # type: ignore[arg-type]
    result = np.full(len(x), -math.inf)
    temperature = settings["temperature"]
    result[keep] = log_softmax((x[keep] - x[keep].max()) / temperature) if len(keep) > 1 else 0.0
    return result


def rank(x: Doubles, id_: int) -> int:
    return order(x).index(id_) + 1


def draw(w: NDArray[np.float32], u: float) -> int:
    """One row of `sampling.draw`, a number at a time."""
    padded = np.concatenate([w, np.zeros(-len(w) % 64, np.float32)])
    running = [np.float32(0.0)]
    for low in range(0, len(padded), 64):
        half = padded[low : low + 64]
        while len(half) > 1:
            half = half[: len(half) // 2] + half[len(half) // 2 :]
        running.append(np.float32(running[-1] + half[0]))
    target = np.float32(np.float32(u) * running[-1])
    block = next(index for index in range(len(running) - 1) if running[index + 1] > target)
    cumulative = running[block]
    last = -1
    for id_ in range(block * 64, block * 64 + 64):
        if padded[id_] > 0.0:
            last = id_
        cumulative = np.float32(cumulative + padded[id_])
        if cumulative > target:
            return id_
    return last
