"""The events of a request, as its result tells them: what happened on the way and when, whoever was asked."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from perdure.api.output import RequestMetrics, RequestOutput
from tests.engine.conftest import MakeAsync, MakeLLM
from tests.engine.helpers import pressure, prompt, run_async, settings
from tests.witness import witness


def metrics_of(output: RequestOutput) -> RequestMetrics:
    assert output.metrics is not None
    return output.metrics


def check_events(output: RequestOutput) -> Counter[str]:
    """In order on one clock from the call to the end, counts as elsewhere. Returns how often each kind came."""
    metrics = metrics_of(output)
    times = [event.time for event in metrics.events]
    kinds = Counter(str(event.kind) for event in metrics.events)
    assert metrics.arrival_time <= times[0] and times == sorted(times)
    assert (metrics.events[0].kind, metrics.events[-1].kind) == ("queued", "ended")
    assert metrics.events[-1].num_tokens == len(output.outputs[0].token_ids)
    assert (kinds["evicted"], kinds["paused"]) == pressure(output)
    assert kinds["scheduled"] == kinds["evicted"] + 1
    assert metrics.finished_time == times[-1]
    return kinds


def test_the_events_of_a_run_under_pressure(make_llm: MakeLLM) -> None:
    """Each request says how it was put aside; prompts of 40 in chunks of at most 20 positions a step."""
    llm = make_llm(num_pages=11, paused_pages=6, max_num_batched_tokens=20, enable_prefix_caching=False)
    before = time.monotonic()
    outputs = llm.generate([prompt(40, i) for i in range(4)], [settings(max_tokens=m) for m in (40, 20, 60, 50)])
    after = time.monotonic()
    kinds: Counter[str] = Counter()
    for output in outputs:
        kinds += check_events(output)
        metrics = metrics_of(output)
        scheduled, first, queue = metrics.first_scheduled_time, metrics.first_token_time, metrics.time_in_queue
        assert scheduled is not None and first is not None and queue is not None and metrics.finished_time is not None
        assert before <= metrics.arrival_time <= scheduled <= first <= metrics.finished_time <= after
        assert queue == scheduled - metrics.arrival_time
        chunks = [event.num_tokens for event in metrics.events if event.kind == "chunk"]
        assert max(chunks) <= 20 and sum(chunks) >= 40
    witness("request-events", **{kind: kinds[kind] for kind in ("chunk", "paused", "resumed", "evicted")})


def test_a_request_that_never_ran_has_no_first_token(make_async: MakeAsync) -> None:
    """Aborted while it waited for a slot."""
    llm = make_async(max_num_seqs=1)

    async def work() -> None:
        running = llm.submit(prompt(8), settings(max_tokens=200))
        waiting = llm.submit(prompt(9), settings(max_tokens=8))
        async for _ in running:
            waiting.abort()
            break
        output = await waiting
        running.abort()
        await running
        metrics = metrics_of(output)
        assert [event.kind for event in metrics.events] == ["queued", "ended"]
        assert metrics.first_scheduled_time is metrics.first_token_time is metrics.time_in_queue is None
        assert metrics.finished_time is not None

    run_async(work())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_journal_that_cannot_be_written_ends_alone(make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    """Requests do not fail for a record of them, and the engine stops as ever."""
    llm = make_llm(journal="/dev/full")
    params = settings(max_tokens=100)
    outputs = [output for _ in range(8) for output in llm.generate([prompt(30), prompt(9)], params)]
    assert all(output.error is None and len(output.outputs[0].token_ids) == 100 for output in outputs)
    llm.shutdown()
    assert [record.message for record in caplog.records if "journal" in record.message] == [
        "the journal ends here, it cannot be written: [Errno 28] No space left on device"
    ]
