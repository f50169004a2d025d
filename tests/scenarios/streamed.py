"""A call's result and every way to stream it, from the events that it got; all must say the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

from msgspec.structs import replace

from perdure.api import event as ev
from perdure.api.output import CompletionOutput, RequestMetrics, RequestOutput
from perdure.api.scores import TokenScores
from perdure.engine.text import StreamBuilder, build_output
from tests.scenarios.scripted import Call

METRICS = RequestMetrics(0.0, ())


def shown(call: Call) -> CompletionOutput:
    """The result. Streams of deltas and of all so far, whatever their interval, joined are it: ids, scores, text."""
    result = _result(call)
    final = result.outputs[0]
    assert (final.logprobs is None) == (not call.request.params.asks_scores)
    assert final.logprobs is None or len(final.logprobs) == len(final.token_ids)
    for interval in (1, 2, 3):
        joined = _joined(parts_of(call, interval=interval))
        assert (joined.token_ids, joined.text, joined.logprobs) == (final.token_ids, final.text, final.logprobs)
        assert joined.weight_epochs == final.weight_epochs
        so_far = parts_of(call, cumulative=True, interval=interval)
        for before, after in pairwise(so_far):
            assert after.text.startswith(before.text)
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert before.logprobs is None or after.logprobs.cut(0, len(before.logprobs)) == before.logprobs
        assert so_far[-1] == final
    return final


def parts_of(call: Call, *, cumulative: bool = False, interval: int = 1) -> list[CompletionOutput]:
    """What a stream gave, part by part. Each has as many ids as scores; the last alone is an ending."""
    request = replace(call.request, params=replace(call.request.params, stream_interval=interval))
    builder = StreamBuilder(request, cast(Any, call.stage.tokenizer), cumulative)
    parts: list[RequestOutput] = []
    for event in call.told:
        if isinstance(event, ev.Ended):
            parts.append(builder.end(_result(call)))
        elif (part := builder.progress(event.token_ids, event.scores, event.epoch)) is not None:
            assert len(part.outputs[0].token_ids) >= interval
            parts.append(part)
    outputs = [part.outputs[0] for part in parts]
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(one.logprobs is None or len(one.logprobs) == len(one.token_ids) for one in outputs)
    assert all(one.finish_reason is None for one in outputs[:-1])
    assert outputs[-1].finish_reason == call.ended.finish_reason
    return outputs


def _result(call: Call) -> RequestOutput:
    return build_output(call.request, call.ended, cast(Any, call.stage.tokenizer), METRICS, return_prompt=False)


def _joined(parts: list[CompletionOutput]) -> CompletionOutput:
    scores = None
    if parts[0].logprobs is not None:
        scores = TokenScores(listed_ids=parts[0].logprobs.listed_ids)
        for part in parts:
            scores.extend(cast(TokenScores, part.logprobs))
    return CompletionOutput(
        index=0,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=scores,
        weight_epochs=[pair for part in parts for pair in part.weight_epochs],
    )
