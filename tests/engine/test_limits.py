"""What an engine may cost in memory, and that a run can be had again from its journal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from perdure import EngineConfig
from perdure.api import event as ev
from perdure.api.config import CoreConfig
from perdure.api.event import Event
from perdure.api.output import RequestOutput
from perdure.api.request import Request
from perdure.core.journal import read, replay
from perdure.core.stopping import TextCursor
from perdure.engine.resolve import Resolved, resolve
from perdure.engine.spelling import text_cursor
from tests.engine.conftest import MakeLLM
from tests.engine.helpers import Brake, in_thread, pressure, prompt, settings
from tests.models.helpers import run_python
from tests.witness import witness

MEMORY_SLACK = 600_000_000
PEAK = """
import json, pathlib, re, resource, sys
from perdure import LLM, SamplingParams

llm = LLM(sys.argv[1], kv_cache_bytes=200_000_000, max_model_len=2048)
ids = [(7 * n) % 40_000 for n in range(600)]
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5, prompt_logprobs=5)
(output,) = llm.generate([ids], params)
about = llm.describe()
status = pathlib.Path("/proc/self/status")
if status.exists():  # Linux: ru_maxrss begins with the peak of the process that started this one
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) * 1024
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([peak, about["weights_bytes"], about["kv_cache_bytes"], len(output.prompt_logprobs)]))
"""


def test_peak_memory_is_weights_and_pool_and_at_most_600_mb(smollm2_path: Path) -> None:
    """In a process of its own: SmolLM2, a pool of 200 MB, 600 prompt tokens scored with the five best of each."""
    peak, weights, pool, num_scored = json.loads(run_python(PEAK, smollm2_path))
    witness("peak-memory", peak_bytes=peak, weights_bytes=weights, pool_bytes=pool, num_scored=num_scored)
    assert num_scored == 600 and 190_000_000 < pool <= 200_000_000
    assert peak <= weights + pool + MEMORY_SLACK


# The journal


def run_with_a_journal(make_llm: MakeLLM, path: Path, depth: int) -> list[RequestOutput]:
    """Greedy and drawn requests with stops and scores, too few pages, a refusal, an abort, a pause, a prefix hit."""
    llm = make_llm(
        journal=str(path), steps_in_flight=depth, num_pages=9, paused_pages=3, max_num_batched_tokens=20, seed=6
    )
    params = [
        settings(max_tokens=40, logprobs=2),
        settings(max_tokens=30, temperature=1.0, prompt_logprobs=1),
        settings(max_tokens=50, stop=["th", "e "], temperature=1.5),
        settings(),
        settings(max_tokens=60, stop_token_sequences=[[1, 2, 3]]),
    ]
    prompts = [prompt(30), prompt(21), prompt(17), [-1], prompt(40)]
    brake = Brake(llm._engine)
    brake.hold(after=6)
    call = in_thread(lambda: llm.generate(prompts, params, request_ids=["a", "b", "c", "d", "e"]))
    brake.wait_until_held()
    llm.abort(["e", "unknown"])
    brake.release()
    llm.pause()
    llm.resume()
    outputs: list[RequestOutput] = call()
    outputs += llm.generate([prompts[0]], settings())
    llm.reset_prefix_cache()
    llm.shutdown()
    witness(
        "journal",
        num_evictions=sum(pressure(output)[0] for output in outputs if output.error is None),
        num_cached_tokens=outputs[-1].num_cached_tokens,
    )
    return outputs


def engine_like(config: CoreConfig, model: Path) -> Resolved:
    """The parts of an engine, made anew, that the journal's own configuration asks for."""
    found = resolve(
        EngineConfig.of(
            model=str(model),
            page_size=config.page_size,
            num_pages=config.num_pages,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            paused_pages=config.paused_pages,
            seed=config.seed,
        )
    )
    assert found.core == config
    return found


def test_a_journal_replays_bit_for_bit(make_llm: MakeLLM, tiny: Path, tmp_path: Path) -> None:
    """Replayed with a new runner that executes each plan again: every plan and every output has the same bits, and the
    ends are the results that were given out."""
    for depth in (1, 2):
        path = tmp_path / f"run-{depth}"
        outputs = run_with_a_journal(make_llm, path, depth)
        file = io.BytesIO(path.read_bytes())
        resolved = engine_like(read(file)[0], tiny)
        tokenizer = resolved.tokenizer
        assert tokenizer is not None

        def cursor(request: Request) -> TextCursor:
            assert tokenizer is not None  # noqa: B023
            return text_cursor(tokenizer, request.params.skip_special_tokens)  # noqa: B023

        file.seek(0)
        executed = replay(file, cursor, resolved.runner.execute)
        file.seek(0)
        assert replay(file, cursor) == executed
        check_ends(executed, outputs)


def check_ends(events: list[Event], outputs: list[RequestOutput]) -> None:
    ends = {event.record.request_id: event.record for event in events if isinstance(event, ev.Ended)}
    refused = {event.request_id for event in events if isinstance(event, ev.Refused)}
    assert refused == {output.request_id for output in outputs if output.error is not None} == {"d"}
    for output in outputs:
        if output.error is None:
            record = ends.pop(output.request_id)
            completion = output.outputs[0]
            assert (record.token_ids, record.finish_reason) == (completion.token_ids, completion.finish_reason)
            assert record.scores == completion.logprobs
            assert record.prompt_scores == output.prompt_logprobs
    assert not ends


WHOLE = """
import json, pathlib, re, sys
from perdure import LLM, SamplingParams

llm = LLM(sys.argv[1], kv_cache_bytes=200_000_000, max_model_len=2048)
params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=-1)
(output,) = llm.generate([[(7 * n) % 40_000 for n in range(200)]], params)
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
about = llm.describe()
print(json.dumps([peak, about["weights_bytes"] + about["kv_cache_bytes"], len(output.prompt_logprobs.top_ids)]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_whole_vocabulary_scores_cost_a_few_bytes_each(smollm2_path: Path) -> None:
    """199 positions of 49,152 ids: what was asked takes 8 bytes a score, and not many times that on the way."""
    peak, base, num_scores = json.loads(run_python(WHOLE, smollm2_path))
    witness("whole-vocabulary-scores", peak_bytes=peak, num_scores=num_scores)
    assert num_scores == 199 * 49152
    assert peak <= base + MEMORY_SLACK + 3 * 8 * num_scores
