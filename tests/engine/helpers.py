"""What the engine's tests share: settings, prompts, comparing results, and the clean end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from perdure import SamplingParams
from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.output import CompletionOutput, RequestOutput, Stats
from perdure.api.plan import StepOutput, StepPlan
from perdure.api.request import Request
from perdure.api.scores import TokenScores
from perdure.engine.engine import Engine
from perdure.engine.llm import LLM, Call
from perdure.engine.pace import Pace
from perdure.models.tiny import BOS_ID, make_tiny_llama
from perdure.runner.base import Ticket
from perdure.runner.runner import Runner
from tests.engine.reference import CLEAR_LEAD, Reference

V, L, PAGE = 512, 256, 16
SCORE_TOLERANCE = 1e-4  # of a right program in fp32, from the true score
ROUNDED = {torch.float32: 0.0, torch.float16: 0.1, torch.bfloat16: 1.0}
"""What logits of M (they spread by 16) lose to each other, by the type they are computed in."""
FRESH = [11, 22, 33, 44]
SINKS: dict[str, tuple[str, dict[str, Any]]] = {
    "feat-swa-sink": ("mistral", {"sliding_window": 5, "softmax_type": "off-by-one"}),
    "feat-alternating-swa-sink": (
        "qwen2",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "softmax_type": "learnable",
        },
    ),
}
"""Families and configurations of the rows with attention sinks. A window of 5 is Megatron-core's (4, 0)."""


def settings(**changes: Any) -> SamplingParams:
    """Greedy, with the chosen scores, not ended by the model's end id."""
    return SamplingParams(**{"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "max_tokens": 16, **changes})


def prompt(length: int, seed: int = 0) -> list[int]:
    """Ids without a pattern, the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids: list[int] = torch.randint(0, V, (length,), generator=generator).tolist()
    return ids


def stopping_late(ids: list[int], keep: bool, skip: bool) -> tuple[int, SamplingParams]:
    """Rows bos-stop-*: where in these greedy ids a new one stands, and settings that stop there with scores."""
    at = next(at for at in range(8, 20) if ids[at] not in ids[:at])
    return at, SamplingParams(
        temperature=1.0,
        top_k=1,
        max_tokens=20,
        ignore_eos=True,
        stop_token_ids=[ids[at]],
        strip_stop_tokens=not keep,
        logprobs=3,
        prompt_logprobs=None if skip else 2,
        return_prompt=True,
    )


def check_stopped_late(result: RequestOutput, ids: list[int], at: int, keep: bool, skip: bool) -> None:
    """What rows bos-stop-* ask of a result of `stopping_late`."""
    found = result.outputs[0]
    assert result.prompt_token_ids is not None and result.prompt_token_ids[0] == BOS_ID
    assert found.token_ids == ids[: at + keep] and found.stop_reason == ids[at]
    scores = found.logprobs
    assert scores is not None and len(scores) == len(found.token_ids) == len(scores.num_top)
    for token, entry, chosen in zip(found.token_ids, scores, scores.chosen):
        assert entry is not None and entry[token].logprob == chosen and entry[token].rank == 1
    assert (result.prompt_logprobs is None) == skip


# Comparing


def check_reference(output: RequestOutput, ids: Sequence[int], reference: Reference) -> None:
    """A greedy result against `ref`: ids, where the best logit must lead clearly at each position, and scores."""
    completion = output.outputs[0]
    assert output.error is None and completion.selected_logprobs is not None
    truth = reference.judge(ids, completion.token_ids)
    assert min(truth.leads, default=1.0) > CLEAR_LEAD, "this prompt proves nothing: two logits are nearly equal"
    assert completion.token_ids == truth.token_ids
    assert len(completion.selected_logprobs) == len(truth.scores)
    for found, true in zip(completion.selected_logprobs, truth.scores):
        assert abs(found - true) <= SCORE_TOLERANCE


def check_equal(output: RequestOutput, other: RequestOutput, num_tokens: int | None = None) -> None:
    """Ids, text and all scores bit for bit. num_tokens: `output` was cut short after so many."""
    assert output.error is None and other.error is None
    for one, two in zip(output.outputs, other.outputs, strict=True):
        check_sample_equal(one, two, num_tokens)
    if num_tokens is None:
        check_scores_equal(output.prompt_logprobs, other.prompt_logprobs)


def check_sample_equal(one: CompletionOutput, two: CompletionOutput, num_tokens: int | None = None) -> None:
    """The same of one sample."""
    count = len(two.token_ids) if num_tokens is None else num_tokens
    assert one.token_ids == two.token_ids[:count] and len(one.token_ids) == count
    check_scores_equal(one.logprobs, None if two.logprobs is None else two.logprobs.cut(0, count))
    if num_tokens is None:
        assert (one.text, one.finish_reason, one.stop_reason) == (two.text, two.finish_reason, two.stop_reason)


def check_close(output: RequestOutput, other: RequestOutput) -> None:
    """The same ids and texts, and scores that two right programs may give."""
    assert output.error is None and other.error is None
    for one, two in zip(output.outputs, other.outputs, strict=True):
        check_sample_close(one, two)
    check_scores_close(output.prompt_logprobs, other.prompt_logprobs)


def check_sample_close(one: CompletionOutput, two: CompletionOutput) -> None:
    """The same of one sample."""
    assert one.token_ids == two.token_ids
    assert (one.text, one.finish_reason, one.stop_reason) == (two.text, two.finish_reason, two.stop_reason)
    check_scores_close(one.logprobs, two.logprobs)


def check_scores_close(one: TokenScores | None, two: TokenScores | None) -> None:
    """Values nearly: each may be wrong by so much. Ids that nearly tie may stand in another order, which must be rare.

    On an H200 the score that magnifies roundings most here is -2.22273 by cuBLAS's products of 8 rows, -2.22288 by our
    own of 2, and -2.22283 in float64.
    """
    assert (one is None) == (two is None)
    if one is None or two is None:
        return
    for name in TokenScores.COLUMNS:
        left, right = getattr(one, name), getattr(two, name)
        if name in ("chosen", "top_scores", "listed_scores"):
            assert len(left) == len(right), f"{name}: {len(left)} and {len(right)} values"
            found, right_values = torch.tensor(left), torch.tensor(right)
            far = ~torch.isclose(found, right_values, atol=2 * SCORE_TOLERANCE, equal_nan=True)
            assert not far.any(), f"{name} differs: {found[far].tolist()}, not {right_values[far].tolist()}"
        elif name in ("rank", "top_ids", "listed_ranks"):
            differing = sum(a != b for a, b in zip(left, right, strict=True))
            assert differing <= 2 + len(left) // 1000, f"{name} differs in {differing} of {len(left)} places"
        else:
            assert left == right, f"{name} differs"


def check_scores_equal(one: TokenScores | None, two: TokenScores | None) -> None:
    """Every column, bit for bit."""
    assert (one is None) == (two is None)
    if one is None or two is None:
        return
    for name in TokenScores.COLUMNS:
        left, right = getattr(one, name), getattr(two, name)
        same = left.tobytes() == right.tobytes() if isinstance(left, array) else left == right
        assert same, f"{name} differs"


def whole_rows(scores: TokenScores | None, size: int = V) -> torch.Tensor:
    """Scores asked with -1, as [entries, size] in order of id."""
    assert scores is not None and set(scores.num_top) == {size}
    ids = torch.tensor(scores.top_ids).view(-1, size)
    values = torch.tensor(scores.top_scores).view(-1, size)
    return torch.empty_like(values).scatter_(1, ids, values)


def pressure(output: RequestOutput) -> tuple[int, int]:
    """How often this request was evicted, and paused."""
    assert output.metrics is not None
    return output.metrics.num_evictions, output.metrics.num_pauses


# The clean end


def stats_of(engine: Engine) -> Stats:
    found = engine.ask(cmd.GetStats).result(timeout=60)
    assert isinstance(found, Stats)
    return found


def check_clean_end(engine: Engine, reference: Reference) -> None:
    """Nothing is left of anything; a fresh request equals its reference (in half types each id is the best after those
    before it, but for their rounding); and nothing is left of that."""
    check_empty(engine)
    call = Call()
    wanted = cmd.Submit(Request("fresh", engine.ticket(), FRESH, settings(max_tokens=6)))
    engine.submit([(wanted, call.receiver(wanted))])
    end = call.wait(1)[wanted.request.ticket]
    assert isinstance(end, ev.Ended)
    ids = end.record.token_ids
    rows = reference.logits([*FRESH, *ids])[len(FRESH) - 1 : -1]
    behind = rows.max(1).values - rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert len(ids) == 6 and behind.max() <= ROUNDED[engine.resolved.loaded.dtype], (ids, behind)
    check_empty(engine)


def check_empty(engine: Engine) -> None:
    """All pages are free, nobody is inside, nobody waits."""
    stats = stats_of(engine)
    assert stats.state == "running"
    assert stats.num_free_pages == stats.num_pages
    assert stats.num_running == stats.num_waiting == stats.num_paused == 0
    assert not engine._receivers, "somebody still waits"


# Doing several things at once


class Brake:
    """Stops the device between two steps, so that what a test does meanwhile has an exact place among them. A GPU runs
    on, but what came of a step stays unknown until it may."""

    def __init__(self, engine: Engine) -> None:
        runner, scheduler = engine.resolved.runner, engine._loop.scheduler
        self._commit = scheduler.commit
        self._changed = threading.Condition()
        self._left: int | None = None
        """Steps that may still run; None = as many as there are."""
        self._is_held = False
        self._num_uncommitted = 0
        engine._loop.pace = Pace()  # it counts plans, so each is one step
        if isinstance(runner, Runner):
            runner.execute = partial(self._braked, runner.execute)  # type: ignore[method-assign]
        else:
            runner.launch = partial(self._launched, runner.launch)  # type: ignore[method-assign]
        scheduler.commit = self._committed  # type: ignore[method-assign]

    def hold(self, after: int) -> None:
        """Let so many more steps run."""
        with self._changed:
            self._left = after
            self._is_held = self._is_held and not after
            self._changed.notify_all()

    def wait_until_held(self) -> None:
        """Until a step stands before the brake, and the core knows what came of all before it."""
        with self._changed:
            stands = self._changed.wait_for(lambda: self._is_held and not self._num_uncommitted, timeout=60)
            assert stands, "no further step came"

    def release(self) -> None:
        with self._changed:
            self._left = None
            self._changed.notify_all()

    def _launched(self, launch: Callable[[StepPlan], Ticket], plan: StepPlan) -> Ticket:
        ticket = launch(plan)
        ticket.wait = partial(self._braked, ticket.wait)  # type: ignore[method-assign]
        return ticket

    def _braked(self, run: Callable[..., StepOutput], *plan: StepPlan) -> StepOutput:
        with self._changed:
            self._is_held = self._left == 0
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._left != 0, timeout=60), "the brake was never released"
            self._is_held = False
            if self._left is not None:
                self._left -= 1
            self._num_uncommitted += 1
        return run(*plan)

    def _committed(self, plan: StepPlan, output: StepOutput) -> list[ev.Event]:
        told = self._commit(plan, output)
        with self._changed:
            self._num_uncommitted -= 1
            self._changed.notify_all()
        return told


def halted(llm: LLM, brake: Brake, halt: Any) -> tuple[Any, int]:
    """Halt while a step stands before the brake. Returns the call's outcome and how many steps were in flight."""
    inbox, scheduler = llm._engine._inbox, llm._engine._loop.scheduler
    before = len(inbox._commands)
    call = in_thread(halt)
    until(lambda: len(inbox._commands) > before)
    num_in_flight = scheduler.steps_in_flight
    brake.release()
    return call(), num_in_flight


def run_async(work: Coroutine[Any, Any, None]) -> None:
    """Run an asynchronous test."""
    asyncio.run(asyncio.wait_for(work, timeout=120))


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start the work on a thread; calling the result waits for what it returned, or raises what it raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((work(), None))
        except BaseException as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(timeout=120)
        assert outcome, "the call never returned"
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    return result


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something another thread does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.0005)


def until_stats(llm: LLM, holds: Callable[[Stats], bool]) -> None:
    until(lambda: holds(llm.stats()))


# A GPU's memory, and a CPU's


def num_replays(llm: LLM) -> int:
    """Steps that were padded to a shape: on a GPU, replays of its graph."""
    shapes = llm._engine.resolved.runner.shapes
    return 0 if shapes is None else sum(shapes.num_steps.values())


def replays_on(device: str, llm: LLM) -> dict[str, int]:
    """For a witness: on a GPU, of which graphs are the default."""
    return {"replays": num_replays(llm)} if device == "cuda" else {}


class PoolWatch:
    """What the pool held when it was copied out, and what after it came back."""

    def __init__(self, engine: Engine) -> None:
        self._kv = engine.resolved.runner._kv
        self._offload, self._restore = self._kv.offload, self._kv.restore
        self.before: dict[int, bytes] = {}
        self.after: dict[int, bytes] = {}
        self._kv.offload = self._offloaded  # type: ignore[method-assign]
        self._kv.restore = self._restored  # type: ignore[method-assign]

    @property
    def address(self) -> int:
        return self._kv._pool.data_ptr()

    @property
    def is_on_gpu(self) -> bool:
        return not self._kv._pool.is_cpu

    @property
    def resident_bytes(self) -> int:
        """Of the pool's range of addresses, what there is memory for."""
        if self.is_on_gpu:
            return self._kv.num_bytes * self._kv.is_here
        size = os.sysconf("SC_PAGE_SIZE")
        first, end = self.address // size, -(-(self.address + self._kv.num_bytes) // size)
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(8 * first)
            entries = array("Q", file.read(8 * (end - first)))
        return size * sum(entry >> 63 for entry in entries)

    def pages(self, pages: Sequence[int]) -> dict[int, bytes]:
        """Their bytes."""
        return {page: self._kv._pool[:, :, :, page].cpu().contiguous().numpy().tobytes() for page in pages}

    def _offloaded(self, pages: Sequence[int]) -> None:
        self.before = self.pages(pages)
        self._offload(pages)

    def _restored(self, pages: Sequence[int]) -> None:
        self._restore(pages)
        self.after = self.pages(pages)


# Models


@contextmanager
def changed_tensors(directory: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The stored tensors of a directory, to be changed in place; written back at the end."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    yield tensors
    save_file(tensors, path, metadata={"format": "pt"})


def flatter_model(model: Path, directory: Path) -> Path:
    """The model with an eighth of its logits, so that several ids may be drawn."""
    shutil.copytree(model, directory)
    with changed_tensors(directory) as tensors:
        tensors["lm_head.weight"] /= 8
    return directory


def constant_model(directory: Path, logits: Sequence[float], **shape: Any) -> Path:
    """A model whose logits are these whatever the context, so that a distribution can be tested through an engine.

    Its layers add nothing, every embedding is the same, and row i of the head gives logit i from one feature of it.
    """
    make_tiny_llama(directory, vocab_size=len(logits), num_layers=1, **shape)
    with changed_tensors(directory) as tensors:
        for name, tensor in tensors.items():
            if name.endswith("norm.weight") or name == "model.embed_tokens.weight":
                tensor.fill_(1.0)
            elif name == "lm_head.weight":
                tensor.zero_()
                tensor[:, 0] = torch.tensor(logits)
            else:
                tensor.zero_()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-30}))
    return directory
