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


def shown(call: Call, child: int = 0) -> CompletionOutput:
    """The result of one child. Its streams of deltas and of all so far, whatever their interval, joined are it: ids,
    scores, text."""
    final = _result(call).outputs[child]
    assert (final.logprobs is None) == (not call.request.params.asks_scores)
    assert final.logprobs is None or len(final.logprobs) == len(final.token_ids)
    for interval in (1, 2, 3):
        joined = _joined(parts_of(call, child, interval=interval))
        assert (joined.token_ids, joined.text, joined.logprobs) == (final.token_ids, final.text, final.logprobs)
        assert joined.weight_epochs == final.weight_epochs
        so_far = parts_of(call, child, cumulative=True, interval=interval)
        for before, after in pairwise(so_far):
            assert after.text.startswith(before.text)
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert before.logprobs is None or after.logprobs.cut(0, len(before.logprobs)) == before.logprobs
        assert so_far[-1] == final
    return final


def parts_of(call: Call, child: int = 0, *, cumulative: bool = False, interval: int = 1) -> list[CompletionOutput]:
    """What a stream gave of one child, part by part. Each has as many ids as scores; the last alone is an ending."""
    request = replace(call.request, params=replace(call.request.params, stream_interval=interval))
    builder = StreamBuilder(request, cast(Any, call.stage.tokenizer), cumulative, child)
    outputs: list[CompletionOutput] = []
    for event in call.told:
        if isinstance(event, ev.Ended):
            if event.record.child == child:
                outputs.append(builder.end(_result(call).outputs[child]))
        elif event.child == child:
            part = builder.progress(event.token_ids, event.scores, event.epoch)
            if part is not None:
                assert len(part.outputs[0].token_ids) >= interval and not part.finished
                outputs += part.outputs
    assert all(one.index == child for one in outputs)
    assert all(one.logprobs is None or len(one.logprobs) == len(one.token_ids) for one in outputs)
    assert all(one.finish_reason is None for one in outputs[:-1])
    assert outputs[-1].finish_reason == call.records[child].finish_reason
    return outputs


def _result(call: Call) -> RequestOutput:
    records = list(call.records.values())
    return build_output(call.request, records, cast(Any, call.stage.tokenizer), METRICS, return_prompt=False)


def _joined(parts: list[CompletionOutput]) -> CompletionOutput:
    scores = None
    if parts[0].logprobs is not None:
        scores = TokenScores(listed_ids=parts[0].logprobs.listed_ids)
        for part in parts:
            scores.extend(cast(TokenScores, part.logprobs))
    return CompletionOutput(
        index=parts[0].index,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=scores,
        weight_epochs=[pair for part in parts for pair in part.weight_epochs],
    )
