"""Interruption storms over the real engine: whatever happens to a request of the tiny model, it ends as its solo run.

- A hypothesis state machine drives `LLM`'s own engine and threads. Only the loop's turns are given by hand
  (`storm_parts.ByHand`), so a storm is the same each time: a failure prints its steps, and its seed alone replays it:

      python -m tests.engine.storm --seed 3

- Weights are M's or others of its shape; an epoch's parity says which. A result that several weights computed is
  compared span by span, so an update can come at any time.
- An update and its way back with no step between may keep what they like: the result must not show it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from perdure import Checkpoint, InvalidValue, SamplingParams, StateError
from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.output import CompletionOutput
from perdure.core.residency import Residency
from perdure.engine.prompts import Prompt, submission
from perdure.models.tiny import make_tiny_llama
from tests.engine.storm_parts import LONGEST, MAX_TURNS, PLACES, PROMPTS, SALTS, SETTINGS, Side, Traveller, Truth

STORMS_A_SEED = 10
NUM_STEPS = 40

BURST_MS = st.sampled_from([0, 60_000])  # whatever a step takes, as many as there may be
NUM_GRAPHS = st.sampled_from([0, 3, 3])
HOME = st.fixed_dictionaries(
    {
        "steps_in_flight": st.integers(1, 4),
        "page_size": st.sampled_from([8, 16]),
        "num_pages": st.sampled_from([12, 14, 20]),
        "max_num_seqs": st.integers(2, 6),
        "max_num_batched_tokens": st.sampled_from([5, 24, 64]),
        "paused_pages": st.sampled_from([0, 4, 8]),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "admit_beside_paused": st.booleans(),
        "poison_free_pages": st.booleans(),
        "seed": st.integers(0, 3),
        "max_burst_ms": BURST_MS,
        "num_cuda_graphs": NUM_GRAPHS,
    }
)
THERE = st.fixed_dictionaries(
    {
        "steps_in_flight": st.integers(1, 4),
        "page_size": st.sampled_from([4, 32]),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.sampled_from([7, 32]),
        "max_burst_ms": BURST_MS,
        "num_cuda_graphs": NUM_GRAPHS,
    }
)
KV = st.sampled_from(["persist", "offload", "recompute"])
CACHES = st.sampled_from(["invalidate", "salt", "keep"])
IN_FLIGHT = st.sampled_from(["recompute", "keep"])


class Storm(RuleBasedStateMachine):
    """Everything happens at `home`; `there` only lets requests go on, with M's weights always."""

    def __init__(self, truth: Truth, marks: Counter[str]) -> None:
        super().__init__()
        self.truth = truth
        self.marks = marks
        self.sides: list[Side] = []
        self.travellers: list[Traveller] = []
        self.may_refuse: set[int] = set()
        self.saved: list[Checkpoint] = []
        self.keeps = False
        self.pins: list[int] = []
        self.num_names = 0
        self.is_judged = True

    @initialize(home=HOME, there=THERE)
    def begin(self, home: dict[str, Any], there: dict[str, Any]) -> None:
        where = self.truth.place.config
        self.sides.append(Side(self.truth.models[0], **where, **{**home, **self.truth.place.home}))
        num_pages = LONGEST // there["page_size"] + 1
        self.sides.append(Side(self.truth.models[0], num_pages=num_pages, **where, **there))
        self.home, self.there = self.sides

    # Requests

    @rule(
        which=st.lists(st.tuples(st.sampled_from([*PROMPTS]), st.sampled_from([*SETTINGS])), min_size=1, max_size=4),
        salt=st.sampled_from(SALTS),
        is_closed=st.booleans(),
    )
    def submit(self, which: list[tuple[str, str]], salt: str | None, is_closed: bool) -> None:
        for ids, params in which:
            self.num_names += 1
            given: Prompt = {"prompt_token_ids": PROMPTS[ids], "cache_salt": salt}
            self._submit(self.home, given, SETTINGS[params], f"request {self.num_names}", is_closed)
        self.turn(1)

    def _submit(
        self, side: Side, given: Prompt | Checkpoint, params: SamplingParams, name: str, is_closed: bool
    ) -> None:
        is_free = isinstance(given, Checkpoint) and not (
            given.exact and (given.fingerprint == side.scheduler.requests.fingerprint or not given.num_output)
        )
        ticket, tokenizer = side.engine.ticket(), side.llm.tokenizer
        wanted = submission(given, params, name, ticket, tokenizer, stream=False, is_closed=is_closed)
        traveller = Traveller(wanted, side, is_free)
        if side.state == "suspended" or name in side.scheduler.requests.live:
            self.may_refuse.add(id(traveller))
        self.travellers.append(traveller)
        side.engine.submit([(wanted, traveller.receiver)])

    @precondition(lambda self: self.travellers)
    @rule(count=st.integers(1, 8))
    def turn(self, count: int) -> None:
        for side in self.sides:
            side.by_hand.turn(count)
        self.marks["pinned pages"] += self.home.scheduler.requests.cache.pins.num_pages
        self._judge()

    @precondition(lambda self: self.travellers)
    @rule(number=st.integers(0, 9), turns=st.integers(0, 2))
    def abort(self, number: int, turns: int) -> None:
        traveller = self.travellers[number % len(self.travellers)]
        traveller.side.llm.abort(traveller.request.request_id if number else None)
        self.turn(1 + turns)

    @precondition(lambda self: self.travellers)
    @rule(number=st.integers(0, 9), end=st.booleans(), pauses=st.sampled_from([False, False, True]))
    def checkpoint(self, number: int, end: bool, pauses: bool) -> None:
        if pauses and self._is_busy():
            self.pause("keep")
        if not self.travellers:
            return
        traveller = self.travellers[number % len(self.travellers)]
        side = traveller.side
        found = side.answer(side.engine.checkpoint(None, end, traveller.request.ticket))
        assert isinstance(found, Checkpoint)
        self.saved.append(Checkpoint.from_bytes(found.to_bytes()))
        self.marks[f"checkpoint while {found.status}, engine {side.state}"] += 1
        self._judge()

    @precondition(lambda self: self.saved)
    @rule(number=st.integers(0, 9), away=st.booleans(), again=st.booleans(), is_closed=st.booleans())
    def go_on(self, number: int, away: bool, again: bool, is_closed: bool) -> None:
        checkpoint = self.saved[number % len(self.saved)]
        if not again:
            self.saved.remove(checkpoint)
        side = self.there if away else self.home
        self._submit(side, checkpoint, checkpoint.params, str(checkpoint.request_id), is_closed)
        self.marks[f"went on {'there' if away else 'here'}"] += checkpoint.num_output > 0
        self.turn(1)

    @precondition(lambda self: self.travellers)
    @rule(prefix=st.sampled_from([*PROMPTS]), salt=st.sampled_from(SALTS), number=st.integers(0, 9))
    def pin(self, prefix: str, salt: str | None, number: int) -> None:
        """One prefix more, or one of the others less where there is no room for it."""
        pin, asked = self.home.engine.pin({"prompt_token_ids": PROMPTS[prefix], "cache_salt": salt})
        try:
            self._order(asked)
            self.pins.append(pin)
        except InvalidValue:
            self.marks["refused pins"] += 1
            if self.pins:
                self._order(self.home.engine.unpin(self.pins.pop(number % len(self.pins))))

    def _unpin(self) -> None:
        while self.pins:
            self._order(self.home.engine.unpin(self.pins.pop()))

    # The engine's state

    def _is_busy(self) -> bool:
        return self.home.scheduler.num_live > 0

    @property
    def _residency(self) -> Residency:
        return self.home.scheduler._control._residency

    def _is_halted(self) -> bool:
        return self.home.state != "running"

    def _order(self, *asked: Future[object]) -> None:
        try:
            for one in asked:
                self.home.answer(one)
        finally:  # a refused order takes turns, too, in which others end
            self._judge()

    @precondition(_is_busy)
    @rule(mode=st.sampled_from(["keep", "keep", "wait", "abort"]))
    def pause(self, mode: cmd.PauseMode) -> None:
        self.marks[f"pause {mode}"] += 1
        self._order(self.home.engine.pause(mode))

    @precondition(_is_busy)
    @rule(kv=KV, weights=st.sampled_from(["keep", "keep", "offload", "drop"]))
    def suspend(self, kv: cmd.KVMode, weights: cmd.WeightsMode) -> None:
        if self.home.state != "suspended":
            self.marks[f"suspended by {kv}"] += self.home.scheduler.stats().num_running > 0
        self._order(self.home.engine.suspend(kv, weights))

    @precondition(_is_halted)
    @rule(tags=st.sampled_from([None, None, ["weights"], ["kv"]]))
    def resume(self, tags: list[cmd.Tag] | None) -> None:
        residency = self._residency
        is_legal = self.home.state != "suspended" or residency.weights_loaded or tags == ["weights"]
        try:
            self._order(self.home.engine.resume(tags))
            assert is_legal
        except StateError:
            assert not is_legal
            self.marks["refused orders"] += 1

    @precondition(_is_halted)
    @rule()
    def resume_whole(self) -> None:
        self._resume_whole()

    def _resume_whole(self) -> None:
        residency = self._residency
        if residency.weights is not None and not residency.weights_loaded:
            self._order(self.home.engine.resume(["weights"]))
        if not residency.weights_loaded:
            self._order(self._update(0, 2, "invalidate", "recompute"))
        self._order(self.home.engine.resume(None))
        assert self.home.state == "running"

    @precondition(lambda self: not self._is_busy() and self.home.scheduler.stats().num_steps > 0)
    @rule(unpins=st.booleans())
    def reset(self, unpins: bool) -> None:
        if unpins:
            self._unpin()
        is_legal = self.home.state != "suspended" and not self.pins
        try:
            self._order(self.home.engine.ask(cmd.Reset))
            assert is_legal
            self.marks["reset"] += 1
        except StateError:
            assert not is_legal
            self.marks["refused orders"] += 1

    @precondition(lambda self: bool(self.home.scheduler.requests.cache.index._nodes))
    @rule()
    def reset_prefix_cache(self) -> None:
        self._order(self.home.engine.ask(cmd.ResetPrefixCache))

    # Weights

    def _update(self, weights: int, age: int, cache: cmd.CachePolicy, in_flight: cmd.InFlightPolicy) -> Future[object]:
        """To weights of this parity, under one of the numbers that name them."""
        model = str(self.truth.models[weights])
        return self.home.engine.update_weights(model, weights + 2 * age, cache, in_flight)

    def _may_update(self) -> bool:
        return self._residency.weights is None

    @precondition(lambda self: self._is_busy() and self._may_update())
    @rule(weights=st.integers(0, 1), age=st.integers(0, 2), salt=st.booleans())
    def update(self, weights: int, age: int, salt: bool) -> None:
        """It may be the same weights once more, if the cache does not tell them apart by their number."""
        salt = salt and weights + 2 * age != self.home.scheduler.requests.weights
        self.marks["updates"] += 1
        self._order(self._update(weights, age, "salt" if salt else "invalidate", "recompute"))

    @precondition(lambda self: self._is_busy() and self._may_update() and self._residency.weights_loaded)
    @rule(cache=CACHES, in_flight=IN_FLIGHT)
    def update_and_back(self, cache: cmd.CachePolicy, in_flight: cmd.InFlightPolicy) -> None:
        """Both orders are there before either is carried out: no step comes between."""
        now = self.home.scheduler.requests.weights
        self.keeps = self.keeps or "keep" in (cache, in_flight)
        self.marks["updates and back"] += 1
        there, back = self._update(1 - now % 2, 3, cache, in_flight), self._update(now % 2, now // 2, cache, in_flight)
        self._order(there, back)
        assert self.home.scheduler.requests.weights == now

    @precondition(_is_busy)
    @rule(age=st.integers(0, 2))
    def move_epoch(self, age: int) -> None:
        self._order(self.home.engine.update_weights(None, self.home.weights + 2 * age, "invalidate", "recompute"))

    # Judging

    def _judge(self) -> None:
        """Everybody who has ended by now."""
        self.is_judged = False
        for traveller in [one for one in self.travellers if one.end is not None]:
            self.travellers.remove(traveller)
            match traveller.end:
                case ev.Refused():
                    assert id(traveller) in self.may_refuse, traveller.end
                    self.marks["refused requests"] += 1
                case ev.Ended():
                    self._judge_one(traveller)
                case other:
                    raise AssertionError(other)
        self.is_judged = True

    def _judge_one(self, traveller: Traveller) -> None:
        request, records = traveller.request, traveller.receiver.records
        ids, params = list(request.prompt_token_ids), request.params
        output = traveller.side.llm._result(traveller.receiver, traveller.end)
        assert output.error is None and [one.index for one in output.outputs] == [*range(params.n)]
        may_differ = self.keeps or traveller.is_free or not self.truth.place.is_exact
        assert output.exact or may_differ, "nothing has happened that is not exact"
        for record in records:
            self._judge_sample(traveller, record, output.outputs[record.child])
        # The prompt was scored by the weights that drew the first token of any sample.
        assert output.metrics is not None
        drawn = [event.child for event in output.metrics.events if event.kind == "first_token"]
        child = drawn[0] if drawn else records[-1].child
        truth = self.truth.of(self._weights_of(traveller, output.outputs[child])[0], ids, params, records[0].seed)
        scored, whole = output.prompt_logprobs, truth.prompt_logprobs
        assert (scored is None) == (whole is None)
        if scored is not None and whole is not None:
            is_whole = any(one.finish_reason != "abort" for one in output.outputs)
            num_scored = len(ids) - 1 if is_whole else scored.num_scored
            self.truth.place.check_scores(scored.cut(0, scored.num_scored), whole.cut(0, num_scored))

    def _weights_of(self, traveller: Traveller, one: CompletionOutput) -> list[int]:
        """Of each span of its output."""
        return [epoch % 2 for _, epoch in one.weight_epochs] or [traveller.weights[one.index]]

    def _judge_sample(self, traveller: Traveller, record: ev.Record, one: CompletionOutput) -> None:
        ids, params = list(traveller.request.prompt_token_ids), traveller.request.params
        assert one.finish_reason in ("stop", "length", "abort")
        count = len(one.token_ids)
        assert count or not one.weight_epochs
        firsts = [first for first, _ in one.weight_epochs]
        weights = self._weights_of(traveller, one)
        now = self.truth.of(weights[0], ids, params, record.seed).outputs[one.index]
        bounds = [*firsts, count] if firsts else [0, 0]
        for (first, end), own, before in zip(pairwise(bounds), weights, [None, *weights], strict=False):
            if before is not None and own != before:
                now = self.truth.from_there(own, ids, params, record, first)
                self.marks["results of several weights"] += 1
            assert one.token_ids[:end] == now.token_ids[:end]
            if one.logprobs is not None and now.logprobs is not None:
                self.truth.place.check_scores(one.logprobs.cut(first, end), now.logprobs.cut(first, end))
        self.marks[one.finish_reason or ""] += 1
        self.marks["structured to their end"] += params.structured_outputs is not None and one.finish_reason == "stop"
        self.marks["later samples"] += one.index > 0 and one.finish_reason != "abort"
        if one.finish_reason != "abort":
            self.truth.place.check_sample(one, now)

    def teardown(self) -> None:
        try:
            if self.sides and self.is_judged:
                self._finish()
        finally:
            for side in self.sides:
                side.close()

    def _finish(self) -> None:
        """All that are left end, and nothing is kept of anything."""
        self._resume_whole()
        for _ in range(MAX_TURNS):
            if not self.travellers:
                break
            self.turn(1)
        assert not self.travellers, "requests never end: a live-lock"
        self._unpin()
        self.turn(max(side.engine._loop.steps_in_flight for side in self.sides))
        for side in self.sides:
            side.check_empty()
            stats = side.scheduler.stats()
            for name in ("num_evictions", "num_pauses", "num_cached_tokens", "num_steps"):
                self.marks[name] += getattr(stats, name)
            self.marks["copies"] += side.num_copies
            self.marks["bursts"] += side.num_bursts
            self.marks["cut prompts"] += side.num_cut
            if (shapes := side.engine.resolved.runner.shapes) is not None:
                self.marks["padded steps"] += sum(shapes.num_steps.values())
        self.marks["storms"] += 1
        depth = self.home.engine._loop.steps_in_flight
        self.marks[f"depth {depth}"] += 1
        self.marks[f"graphs at depth {depth}"] += self.home.engine.resolved.runner.shapes is not None


def run_storms(number: int, truth: Truth, marks: Counter[str], shrink: bool = False) -> None:
    """The storms of this seed; the first failure says how to replay it."""
    factory: Callable[[], Storm] = seed(number)(lambda: Storm(truth, marks))
    try:
        run_state_machine_as_test(
            factory,
            settings=settings(
                max_examples=STORMS_A_SEED,
                stateful_step_count=NUM_STEPS,
                derandomize=False,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            ),
        )
    except BaseException as error:
        error.add_note(f"replay: python -m tests.engine.storm --seed {number}")
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="of seeds")
    parser.add_argument("--device", choices=PLACES, default="cpu")
    parser.add_argument("--shrink", action="store_true", help="look for the shortest failing storm, for minutes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    marks: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        models = make_tiny_llama(Path(directory) / "0", seed=0), make_tiny_llama(Path(directory) / "1", seed=1)
        truth = Truth(models, PLACES[args.device])
        for number in range(args.seed, args.seed + args.count):
            run_storms(number, truth, marks, args.shrink)
        truth.close()
    for name, number in sorted(marks.items()):
        print(f"  {name}: {number}")


if __name__ == "__main__":
    sys.exit(main())
