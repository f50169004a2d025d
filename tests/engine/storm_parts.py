"""What a storm is made of: requests, engines that are turned by hand, and the truth about a request alone."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from perdure import LLM, Checkpoint, SamplingParams
from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Sample
from perdure.api.ending import Ending
from perdure.api.output import CompletionOutput, RequestOutput
from perdure.api.plan import StepPlan
from perdure.api.scores import TokenScores
from perdure.core import budget
from perdure.engine.engine import Engine
from perdure.engine.handle import Arrivals
from perdure.engine.pace import Pace
from tests.engine.helpers import (
    V,
    check_sample_close,
    check_sample_equal,
    check_scores_close,
    check_scores_equal,
    prompt,
)

LENGTHS = (1, 5, 15, 16, 17, 33, 48, 70)
PROMPTS = {f"{base}/{length}": prompt(70, base)[:length] for base in (1, 2) for length in LENGTHS}
"""Two families that share their beginnings."""
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0),
    "scored": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    "urgent": SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, priority=-1, skip_reading_prefix_cache=True
    ),
    "drawn": SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True, logprobs=2),
    "own seed": SamplingParams(max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0, priority=1),
    "stop ids": SamplingParams(max_tokens=24, seed=5, stop_token_ids=list(range(0, V, 12)), min_tokens=3, logprobs=1),
    "sequences": SamplingParams(max_tokens=24, seed=6, stop_token_sequences=[[i] for i in range(1, V, 20)]),
    "structured": SamplingParams(max_tokens=24, seed=8, logprobs=1, structured_outputs={"regex": "([a-f]{1,3} ){3,6}"}),
    "structured to its end": SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, structured_outputs={"choice": ["abc", "abd and more"]}
    ),
    "no output": SamplingParams(max_tokens=0, prompt_logprobs=1),
    "two": SamplingParams(n=2, max_tokens=12, seed=8, ignore_eos=True, logprobs=1, prompt_logprobs=0),
    "four": SamplingParams(n=4, max_tokens=18, stop_token_ids=list(range(3, V, 25)), logprobs=0),
    "looking back": SamplingParams(n=3, max_tokens=10, seed=9, repetition_penalty=1.3, prompt_logprobs=1),
}
SALTS = (None, None, "a", "b")
LONGEST = 96
"""Room for the longest prompt and output."""
MAX_TURNS = 3000


class ByHand:
    """Turns of an engine's loop happen when a test says so, on its own thread; what was sent before is applied in it.

    Between turns that thread stands still, so the core can be looked at.
    """

    def __init__(self, engine: Engine) -> None:
        self._changed = threading.Condition()
        self._left = 0
        self._is_open = False
        self._error: BaseException | None = None
        self._turn = engine._loop.turn
        engine._loop.turn = self._gated  # type: ignore[method-assign]
        engine.ask(cmd.GetStats).result(timeout=60)  # the turn that had begun ends with this

    def turn(self, count: int = 1) -> None:
        with self._changed:
            self._left = count
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._left or self._error is not None, timeout=60)
        assert done, "a turn never ended"
        if self._error is not None:
            raise AssertionError("the engine died") from self._error

    def let_go(self) -> None:
        """It turns by itself from now on."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def _gated(self, block: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left > 0 or self._is_open)
        if self._is_open:
            self._turn(block)
            return
        try:
            self._turn(block=False)
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self._changed:
                self._left -= 1
                self._changed.notify_all()


@dataclass(frozen=True)
class Place:
    """Where engines run, and what results of one request have in common there, whatever its company. home: what every
    storm's first engine has; the rest is drawn."""

    config: Mapping[str, Any]
    check_sample: Callable[[CompletionOutput, CompletionOutput], None]
    check_scores: Callable[[TokenScores | None, TokenScores | None], None]
    is_exact: bool
    home: Mapping[str, Any] = field(default_factory=dict)


GRAPHS = {"cuda_graph_max_tokens": 16, "cuda_graph_mixed_prefill": 2}
PLACES = {
    "cpu": Place({"device": "cpu", **GRAPHS}, check_sample_equal, check_scores_equal, is_exact=True),
    "cuda": Place(
        {"device": "cuda", **GRAPHS},
        check_sample_close,
        check_scores_close,
        is_exact=False,
        home={"num_cuda_graphs": 3, "steps_in_flight": 2, "max_burst_ms": 60_000},
    ),
}
"""Where a storm has graphs, steps are padded to their shapes, also on a CPU, and prompts cut beside rows that decode.
Truth has none."""


class Truth:
    """Solo runs, alone, in one chunk, one step at a time, nothing cached; each is made once. Samples of one request
    come one after the other, so they share nothing."""

    def __init__(self, models: tuple[Path, Path], place: Place = PLACES["cpu"]) -> None:
        self.models = models
        self.place = place
        config: dict[str, Any] = {
            **place.config,
            "num_cuda_graphs": 0,
            "steps_in_flight": 1,
            "max_burst_ms": 0,
            "enable_prefix_caching": False,
            "num_pages": 16,
            "max_num_seqs": 1,
        }
        self._engines = [LLM(str(model), **config) for model in models]
        self._known: dict[Any, RequestOutput] = {}

    def of(self, weights: int, ids: list[int], params: SamplingParams, seed: int) -> RequestOutput:
        key = weights, tuple(ids), repr(params), seed * (params.temperature > 0)
        if key not in self._known:
            (self._known[key],) = self._engines[weights].generate([ids], replace(params, seed=seed))
        return self._known[key]

    def from_there(
        self, weights: int, ids: list[int], params: SamplingParams, record: ev.Record, count: int
    ) -> CompletionOutput:
        """How a sample ends that has the record's first tokens already, whoever drew them: as a checkpoint made here,
        in which its siblings have ended."""
        engine, none = self._engines[weights], TokenScores(listed_ids=params.logprob_token_ids).pack()
        over = Sample(scores=none if params.asks_scores else None, ending=Ending("abort"))
        begun = Sample(
            tokens=array("i", record.token_ids[:count]).tobytes(),
            scores=None if record.scores is None else record.scores.cut(0, count).pack(),
            epochs=((0, 0),),
        )
        prompt_scores = TokenScores(leading_none=True)
        for token in ids[1:]:
            prompt_scores.append(token, 0.0, 1, array("i"), array("f"))
        checkpoint = Checkpoint(
            request_id="begun",
            status="waiting",
            params=params,
            prompt=None,
            prompt_tokens=array("i", ids).tobytes(),
            max_output=params.max_tokens or 0,
            seed=record.seed,
            logprobs_mode="raw",
            samples=tuple(begun if child == record.child else over for child in range(params.n)),
            prompt_scores=None if params.prompt_logprobs is None else prompt_scores.pack(),
            fingerprint=engine._engine.resolved.core.fingerprint,
            num_cached_tokens=0,
            num_checkpoints=0,
        )
        return engine.generate([checkpoint])[0].outputs[record.child]

    def close(self) -> None:
        for engine in self._engines:
            engine.shutdown()


class Traveller:
    """A request on its way, in the engine it was submitted to. is_free: what may cost it its `exact` has happened."""

    def __init__(self, wanted: cmd.Submit, side: Side, is_free: bool) -> None:
        self.request = wanted.request
        self.side = side
        self.is_free = is_free
        self.receiver = Arrivals(wanted, self._ended)
        self.end: ev.Event | None = None
        self.weights: dict[int, int] = {}
        """Those of the engine when each sample ended."""

    def _ended(self, event: Any) -> None:
        assert self.end is None, f"two ends of {self.request.request_id}"
        if isinstance(event, ev.Ended):
            assert event.record.child not in self.weights, "two ends of one sample"
            self.weights[event.record.child] = self.side.weights
            if event.num_left:
                return
        self.end = event


class Unhurried(Pace):
    """Bursts of as many steps as there may be: a storm must not depend on how long a step takes."""

    def took(self, plan: StepPlan, seconds: float) -> None:
        super().took(plan, 0.0)


class Side:
    """One of the two engines, turned by hand."""

    def __init__(self, model: Path, **config: Any) -> None:
        self.llm = LLM(str(model), max_model_len=LONGEST, check_integrity=True, **config)
        self.engine = self.llm._engine
        self.scheduler = self.engine._loop.scheduler
        self.engine._loop.pace = Unhurried(self.engine.resolved.config.max_burst_ms or 0)
        self.by_hand = ByHand(self.engine)
        for number, params in enumerate(SETTINGS.values()):
            if params.structured_outputs is not None:  # compiled now: when else, would be another storm each time
                grammars = self.engine.resolved.runner.grammars
                grammars.hold(-number, params.structured_outputs).result(timeout=60)
        self.num_copies = self.num_bursts = self.num_cut = 0
        self._plan = self.scheduler.plan
        self.scheduler.plan = self._counted_plan  # type: ignore[method-assign]

    def _counted_plan(self, most_steps: int) -> StepPlan | None:
        plan = self._plan(most_steps)
        if plan is not None:
            self.num_copies += len(plan.copy_from)
            self.num_bursts += plan.num_steps > 1
            self.num_cut += self._is_cut(plan)
        return plan

    def _is_cut(self, plan: StepPlan) -> bool:
        """Whether prompts take all that followed rows which decode leave them, and it is less than a step has left."""
        config, requests = self.scheduler.config, self.scheduler.requests
        num_decodes = plan.num_tokens.count(0)
        if not (num_decodes and plan.tokens and requests.num_open and config.max_num_mixed_tokens):
            return False
        left = budget.beside(num_decodes, config.max_num_batched_tokens, config.max_num_mixed_tokens)
        return len(plan.tokens) == left < config.max_num_batched_tokens - num_decodes

    @property
    def weights(self) -> int:
        return self.scheduler.requests.weights % 2

    @property
    def state(self) -> str:
        return self.scheduler.stats().state

    def answer(self, asked: Future[object]) -> Any:
        """What comes of an order, turning until it has."""
        for _ in range(MAX_TURNS):
            if asked.done():
                return asked.result()
            self.by_hand.turn()
        raise AssertionError(f"an order was not answered in {MAX_TURNS} turns")

    def check_empty(self) -> None:
        stats = self.scheduler.stats()
        assert stats.state == "running" and stats.num_free_pages == stats.num_pages
        assert stats.num_running == stats.num_waiting == stats.num_paused == 0
        assert not self.scheduler.requests.states and not self.engine._receivers

    def close(self) -> None:
        self.by_hand.let_go()
        self.llm.shutdown()
