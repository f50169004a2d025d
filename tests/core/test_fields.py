"""The field policy: every field has a line, and the lines are true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from docs.fields import page
from msgspec.structs import replace

from perdure.api.checkpoint import Checkpoint, Sample, Timing
from perdure.api.command import Submit
from perdure.api.ending import Ending, StopMatch
from perdure.api.event import Record
from perdure.api.fields import FIELDS
from perdure.api.moment import RequestEvent
from perdure.api.output import CompletionOutput, RequestMetrics, RequestOutput
from perdure.api.request import Request
from perdure.api.sampling import SamplingParams
from perdure.core.checkpoint import readmit, take
from perdure.core.group import Group
from perdure.core.lifecycle import Status
from perdure.core.state import RequestState
from tests.core.helpers import Bench

ROOT = Path(__file__).parents[2]
STRUCTS = (Request, SamplingParams, Checkpoint, Sample, Record, RequestOutput, CompletionOutput, RequestMetrics)

SETTINGS: dict[str, Any] = {
    "n": 3,
    "max_tokens": 40,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.4,
    "logit_bias": ((3, 1.5), (9, -2.0)),
    "allowed_token_ids": (1, 2, 3, 4, 5, 6, 7, 8, 9),
    "bad_words": ((1, 2), (30,)),
    "logits_processors": ("module:function",),
    "seed": 2**64 - 1,
    "stop": ("never this",),
    "stop_token_ids": (31,),
    "stop_token_sequences": ((30, 30, 30),),
    "ignore_eos": True,
    "strip_stop_tokens": True,
    "include_stop_str_in_output": True,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "logprobs_mode": "processed",
    "logprob_token_ids": (5, 31),
    "forced_token_ids": (1, 2),
    "skip_special_tokens": False,
    "return_prompt": True,
    "output_kind": "cumulative",
    "stream_interval": 3,
    "priority": -4,
    "skip_reading_prefix_cache": True,
}
"""Every setting at another value than its default; detokenize=False goes without stop strings, and structured outputs
without forced ids."""


class Letters:
    def push(self, token_ids: Any) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


def going_on(bench: Bench, checkpoint: Checkpoint, request_id: str = "again") -> Group:
    """The group it is on its arrival elsewhere, after its file form and a command's."""
    checkpoint = Checkpoint.from_bytes(checkpoint.to_bytes())
    wire = msgspec.msgpack.encode(Submit(checkpoint.as_request(request_id, 5, False), checkpoint))
    sent = msgspec.msgpack.decode(wire, type=Submit)
    assert sent.checkpoint == checkpoint
    fingerprint = bench.scheduler.requests.fingerprint
    return readmit(sent.request, sent.checkpoint, 77, fingerprint, bench.config, lambda request: Letters())


SAMPLE = 1
"""The child that is looked at."""


@pytest.fixture
def lived() -> tuple[Bench, RequestState]:
    """A request that runs, after an eviction, a pause and a hit, with every setting set and a step in flight. Of its
    three children the first has ended."""
    bench = Bench(logprobs_mode="raw")
    bench.scheduler._make_cursor = lambda request: Letters()
    params = SamplingParams(**SETTINGS)
    bench.apply(Submit(Request("a", 3, list(range(1, 12)), params, "its text", True, "its salt")))
    for _ in range(5):
        bench.step()
    group = bench.scheduler.requests.live["a"]
    bench.scheduler.requests.end(group.children[0], Ending("stop", StopMatch(30, 5, 1)))
    state = group.children[SAMPLE]
    state.num_pauses, state.num_evictions = 2, 3
    group.num_cached, group.num_checkpoints = 8, 4
    state.exact, state.epochs = False, [(0, 3), (2, 7)]
    state.tried_at, state.paused_at, state.replay, group.waits_for = 9, 5, 2, "something"
    state.awaits = True
    bench.launch()
    assert state.in_flight and state.num_output == 4 and state.pages and state.num_computed < state.num_planned
    return bench, state


def test_every_field_has_a_line_and_every_line_a_field() -> None:
    found = {cls.__name__: set(cls.__struct_fields__) for cls in STRUCTS}
    found["RequestState"] = {*RequestState.__slots__}
    found["Group"] = {*Group.__slots__}
    assert {name: set(lines) for name, lines in FIELDS.items()} == found


def test_every_field_of_a_result_is_shown_by_something_and_nothing_else_is_named() -> None:
    paths = {name for name in RequestOutput.__struct_fields__}
    paths |= {f"outputs.{name}" for name in CompletionOutput.__struct_fields__}
    paths |= {f"metrics.{name}" for name in RequestMetrics.__struct_fields__}
    sources = ("Request", "SamplingParams", "Group", "RequestState", "Checkpoint", "Sample", "Record")
    shown = {path for name in sources for policy in FIELDS[name].values() for path in policy.result.split(", ") if path}
    assert shown <= paths
    assert paths - shown == {"outputs", "finished", "metrics"}  # of its shape only


def test_every_setting_is_kept(lived: tuple[Bench, RequestState]) -> None:
    bench, state = lived
    assert set(SETTINGS) == set(SamplingParams.__struct_fields__) - {"detokenize", "structured_outputs"}
    defaults = SamplingParams()
    assert all(getattr(defaults, name) != value for name, value in SETTINGS.items())
    params = going_on(bench, take(state.group, bench.config.fingerprint)).request.params
    for name, policy in FIELDS["SamplingParams"].items():
        assert policy.checkpoint == "kept" and policy.wire == "sent"
        if name in SETTINGS:
            assert getattr(params, name) == SETTINGS[name]
    without = replace(take(state.group, bench.config.fingerprint), params=replace(params, stop=(), detokenize=False))
    assert going_on(bench, without).request.params.detokenize is False
    schema = {"type": "object", "properties": {"b": {"const": "\u00e9"}, "a": {"const": 1}}}
    for asked in ({"json": schema, "disable_any_whitespace": True}, {"choice": ["yes", "no"]}, {"json_object": True}):
        wanted = replace(params, forced_token_ids=None, structured_outputs=asked)
        again = going_on(bench, replace(without, params=wanted))
        assert again.request.params.structured_outputs == wanted.structured_outputs and again.waits_for


@pytest.mark.parametrize("name", FIELDS["Group"])
def test_a_group_goes_on_as_its_policy_says(name: str, lived: tuple[Bench, RequestState]) -> None:
    bench, group = lived[0], lived[1].group
    before = getattr(group, name)
    again = going_on(bench, take(group, bench.config.fingerprint))
    fresh = Group(again.request, 0, "raw")
    match FIELDS["Group"][name].checkpoint:
        case "kept":
            assert getattr(again, name) == before != getattr(fresh, name) and getattr(again, name) is not None
        case "anew" if name == "held":  # nobody is held here now
            assert not again.held
        case "anew":
            assert getattr(again, name) == getattr(fresh, name) != before
        case policy:
            assert policy == "made"
    assert again.num_checkpoints == group.num_checkpoints + 1
    assert [child.child for child in again.children] == [0, 1, 2] and group.num_left == 2


@pytest.mark.parametrize("name", FIELDS["RequestState"])
def test_a_state_goes_on_as_its_policy_says(name: str, lived: tuple[Bench, RequestState]) -> None:
    bench, state = lived
    before = getattr(state, name)
    again = going_on(bench, take(state.group, bench.config.fingerprint)).children[SAMPLE]
    fresh = RequestState(again.group, again.arrival, again.stops)
    match FIELDS["RequestState"][name].checkpoint:
        case "kept" if name == "ending":
            first = going_on(bench, take(state.group, bench.config.fingerprint)).children[0]
            assert first.ending == state.group.children[0].ending == Ending("stop", StopMatch(30, 5, 1))
        case "kept":
            assert getattr(again, name) == before != getattr(fresh, name) and getattr(again, name) is not None
        case "anew" if name == "num_copied":  # its copy is committed
            assert again.num_copied == 0
        case "anew":
            assert getattr(again, name) == getattr(fresh, name) != before
        case policy:
            assert policy == "made"
    assert again.order == (-4, 77 + SAMPLE)
    assert again.stops.max_output == state.stops.max_output and again.status is Status.WAITING


@pytest.mark.parametrize("name", FIELDS["Checkpoint"])
def test_a_checkpoint_of_a_checkpoint_keeps_what_it_says(name: str, lived: tuple[Bench, RequestState]) -> None:
    bench, state = lived
    first = take(state.group, bench.config.fingerprint)
    second = take(going_on(bench, first, "a"), bench.config.fingerprint)
    one, two = getattr(first, name), getattr(second, name)
    match FIELDS["Checkpoint"][name].checkpoint:
        case "kept" if name == "timing":  # of whoever has the clock
            timed = replace(first, timing=Timing(1.5, (RequestEvent("queued", 0.25, 7),)))
            assert Checkpoint.from_bytes(timed.to_bytes()).timing == timed.timing
        case "kept":
            assert one == two
        case "anew":
            assert name in ("status", "fingerprint")
        case policy:
            assert policy == "made" and two == one + 1


@pytest.mark.parametrize("name", FIELDS["Sample"])
def test_each_sample_is_kept(name: str, lived: tuple[Bench, RequestState]) -> None:
    bench, state = lived
    first = take(state.group, bench.config.fingerprint)
    second = take(going_on(bench, first, "a"), bench.config.fingerprint)
    assert FIELDS["Sample"][name].checkpoint == "kept"
    assert [getattr(one, name) for one in first.samples] == [getattr(one, name) for one in second.samples]
    assert any(getattr(one, name) != getattr(Sample(), name) for one in first.samples)


def test_a_request_is_kept_but_for_who_submits_it(lived: tuple[Bench, RequestState]) -> None:
    bench, state = lived
    again = going_on(bench, take(state.group, bench.config.fingerprint), "a").request
    for name, policy in FIELDS["Request"].items():
        if policy.checkpoint == "kept":
            assert getattr(again, name) == getattr(state.request, name)
        else:
            assert name in ("ticket", "stream", "routed", "is_closed") and policy.checkpoint == "no"


def test_s03_a_checkpoint_shares_nothing_with_the_live_request(lived: tuple[Bench, RequestState]) -> None:
    """What becomes of the request afterwards, or is done to it, shows in no copy, and the other way round."""
    bench, state = lived
    taken = take(state.group, bench.config.fingerprint)
    data = taken.to_bytes()
    one, two = (going_on(bench, taken).children[SAMPLE] for _ in range(2))
    for other in (state, one):
        other.tokens.append(1)
        assert other.scores is not None and other.prompt_scores is not None
        for scores in (other.scores, other.prompt_scores):
            for name in ("chosen", "rank", "num_top", "top_ids", "top_scores", "token_ids"):
                getattr(scores, name)[0] = 1
        other.num_pauses += 100
    assert taken.to_bytes() == data
    third = going_on(bench, taken).children[SAMPLE]
    assert (two.tokens, two.scores, two.prompt_scores) == (third.tokens, third.scores, third.prompt_scores)
    assert two.num_pauses == 2 and two.tokens[-1] == taken.samples[SAMPLE].token_ids[-1]


def test_the_page_of_fields_is_the_table() -> None:
    assert (ROOT / "docs" / "fields.md").read_text() == page(), "run: python docs/fields.py"
