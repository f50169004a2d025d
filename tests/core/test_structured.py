"""Structured outputs without a device: what is refused where it is built, and requests that wait for their grammar."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.errors import InvalidValue
from perdure.api.event import Failure
from perdure.api.grammar_limits import (
    MAX_BRACKETS,
    MAX_BYTES,
    MAX_DEPTH,
    MAX_PARTS,
    MAX_REPEATS,
    MAX_RULES,
    MAX_UNFOLDED,
)
from perdure.api.sampling import SamplingParams
from perdure.api.structured import StructuredOutputsParams
from tests.core.helpers import Bench, ticket_of
from tests.witness import witness

DEEP: Any = {"type": "array"}
for _ in range(100_000):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "none given"),
        ({"json": "{}", "regex": "a"}, "json and regex given"),
        ({"json_object": True, "choice": ["a"]}, "choice and json_object given"),
        ({"json_object": 1}, "structured_outputs.json_object=1 is not a bool"),
        ({"json": "{", "disable_any_whitespace": None}, "disable_any_whitespace=None is not a bool"),
        ({"json": '{"type": '}, "structured_outputs.json='{\"type\": ' is no JSON"),
        ({"json": {"const": float("nan")}}, "is no JSON"),
        ({"json": {"const": {1, 2}}}, "is no JSON"),
        ({"json": DEEP}, "is no JSON"),
        ({"json": "[1, 2]"}, "structured_outputs.json=[1, 2] is no JSON schema"),
        ({"json": 7}, "structured_outputs.json=7 is neither a dictionary, a bool nor text"),
        ({"json": {"const": "\ud800"}}, "not valid Unicode"),
        ({"regex": ""}, "structured_outputs.regex='' is not a non-empty string"),
        ({"regex": 7}, "structured_outputs.regex=7 is not a non-empty string"),
        ({"regex": "\udc00"}, "not valid Unicode"),
        ({"grammar": ""}, "structured_outputs.grammar='' is not a non-empty string"),
        ({"choice": []}, "structured_outputs.choice=[] leaves nothing"),
        ({"choice": "yes"}, "structured_outputs.choice='yes' is not a list"),
        ({"choice": ["yes", ""]}, "choice holds ''"),
        ({"choice": ["yes", 7]}, "choice holds 7"),
        (
            {"regex": "a" * (MAX_BYTES["regex"] + 1)},
            f"structured_outputs.regex has {MAX_BYTES['regex'] + 1} bytes, more than {MAX_BYTES['regex']}",
        ),
        ({"schema": {}}, "structured_outputs has no field 'schema'; its fields: json, regex"),
        ("[a-z]+", "structured_outputs='[a-z]+' is neither"),
    ],
)
def test_what_is_wrong_by_itself_is_refused_where_it_is_built(asked: Any, named: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        SamplingParams(structured_outputs=asked)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 600


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def chained(num_rules: int) -> str:
    return "start: r1\n" + "".join(f'r{n}: "a" r{n + 1}\n' for n in range(1, num_rules - 1)) + f'r{num_rules - 1}: "b"'


LIMITS: list[tuple[str, Any, Any, str]] = [
    ("json", nested(MAX_DEPTH), nested(MAX_DEPTH + 1), f"is nested more than {MAX_DEPTH} levels deep"),
    (
        "json",
        {"anyOf": [{} for _ in range(MAX_PARTS - 2)]},
        {"anyOf": [{} for _ in range(MAX_PARTS - 1)]},
        f"has more than {MAX_PARTS} objects and lists",
    ),
    (
        "json",
        {"properties": {"pattern": {"pattern": "a" * MAX_UNFOLDED}}},
        {"properties": {"pattern": {"pattern": "((a{10}){10,100}b?){10}"}}},
        f"has a pattern that unfolds to more than {MAX_UNFOLDED} parts",
    ),
    (
        "json",
        {"patternProperties": {"a?" * MAX_REPEATS: {}}},
        {"patternProperties": {"a?" * (MAX_REPEATS + 1): {}}},
        f"has a pattern that has more than {MAX_REPEATS} repetitions",
    ),
    ("regex", "(" * MAX_DEPTH + "a" + ")" * MAX_DEPTH, "(?:" * 101 + "a" + ")" * 101, f"more than {MAX_DEPTH} groups"),
    ("regex", "[(]" * 200 + r"\(" * 200, "[(](" * 101 + "a" + ")" * 101, f"nested more than {MAX_DEPTH} groups deep"),
    ("regex", f"a{{{MAX_UNFOLDED}}}", f"a{{{MAX_UNFOLDED}}}b", f"unfolds to more than {MAX_UNFOLDED} parts"),
    ("regex", "(a{10}){100}", "(a{1000}){1000}", f"unfolds to more than {MAX_UNFOLDED} parts"),
    ("regex", "ab*" * MAX_REPEATS, "ab*" * MAX_REPEATS + "c+", f"has more than {MAX_REPEATS} repetitions"),
    ("grammar", chained(MAX_RULES), chained(MAX_RULES + 1), f"has {MAX_RULES + 1} rules and terminals, more than 1000"),
    (
        "grammar",
        f'start: {"(" * MAX_BRACKETS}"(("{")" * MAX_BRACKETS}',
        f'start: {"(" * 26}"a"{")" * 26}',
        f"more than {MAX_BRACKETS} brackets",
    ),
    (
        "grammar",
        'root ::= [(] "(" [(] ' * 60,
        f'root ::= {"(" * 26}"a"{")" * 26}',
        f"more than {MAX_BRACKETS} brackets",
    ),
    (
        "grammar",
        "start: /a{1000}/",
        "start: /(a{1000}){1000}/",
        f"has a pattern that unfolds to more than {MAX_UNFOLDED}",
    ),
    (
        "grammar",
        "start: " + '"a"* ' * MAX_REPEATS,
        "start: " + '"a"* ' * (MAX_REPEATS + 1),
        "more than 2000 repetitions",
    ),
]


@pytest.mark.parametrize(("kind", "within", "beyond", "named"), LIMITS, ids=range(len(LIMITS)))
def test_what_is_larger_or_deeper_than_the_limits_is_refused_where_it_is_built(
    kind: str, within: Any, beyond: Any, named: str
) -> None:
    """What compiles them would overflow its stack, which ends the process, or take for ever."""
    SamplingParams(structured_outputs={kind: within})
    with pytest.raises(InvalidValue) as caught:
        SamplingParams(structured_outputs={kind: beyond})
    assert str(caught.value).startswith(f"structured_outputs.{kind} ") and named in str(caught.value)


SELF: dict[str, Any] = {"$ref": "#"}
HAS_SELF: dict[str, Any] = {"type": "object", "properties": {"a": SELF}, "required": ["a"]}
PAIR = {
    "x": {"type": "array", "prefixItems": [{"$ref": "#/$defs/y"}], "minItems": 1},
    "y": {"type": "object", "properties": {"k": {"$ref": "#/$defs/x"}}, "required": ["k"]},
}
ENDLESS: list[dict[str, Any]] = [
    SELF,
    HAS_SELF,
    {"allOf": [SELF, {}]},
    {"anyOf": [HAS_SELF, SELF]},
    {"type": "array", "items": SELF, "minItems": 1},
    {"$defs": PAIR, "$ref": "#/$defs/x"},
]
ENDING: list[dict[str, Any]] = [
    {**HAS_SELF, "required": []},
    {**HAS_SELF, "type": ["object", "null"]},
    {"properties": {"a": SELF}, "required": ["a"]},
    {"anyOf": [SELF, {"type": "null"}]},
    {"type": "array", "items": SELF},
    {"$defs": {**PAIR, "y": {"type": "null"}}, "$ref": "#/$defs/x"},
    {"$ref": "https://elsewhere"},
    {"$ref": "#/$defs/none"},
]


@pytest.mark.parametrize("schema", ENDLESS, ids=range(len(ENDLESS)))
def test_a_schema_that_requires_itself_without_end_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=r"structured_outputs\.json=.* requires itself within itself, without end"):
        SamplingParams(structured_outputs={"json": schema})


@pytest.mark.parametrize("schema", ENDING, ids=range(len(ENDING)))
def test_a_schema_that_may_hold_itself_and_end_is_taken(schema: dict[str, Any]) -> None:
    SamplingParams(structured_outputs={"json": schema})


def test_forms_that_say_the_same_are_the_same() -> None:
    """vLLM's form and a plain dictionary; a schema as dictionary and as text; a caller's own objects stay untouched."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    one = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)).structured_outputs
    two = SamplingParams(structured_outputs={"json": schema}).structured_outputs
    assert one == two and hash(one) == hash(two) and one is not None
    for schema_bool, text in ((True, "true"), (False, "false")):
        assert StructuredOutputsParams(json=schema_bool) == StructuredOutputsParams(json=text)
    assert one.text.index('"b"') < one.text.index('"a"'), "the order of properties is that of the output"
    choices = ["b", "a"]
    asked = StructuredOutputsParams(choice=choices)
    choices.append("c")
    assert asked.choice == ("b", "a") and asked.kind == "choice" and asked.text == '["b", "a"]'
    anything = StructuredOutputsParams(json_object=True)
    assert anything.kind == "json" and anything.text == '{"type": "object"}'


def test_structured_outputs_and_forced_ids_exclude_each_other() -> None:
    with pytest.raises(InvalidValue, match="structured_outputs and forced_token_ids"):
        SamplingParams(structured_outputs={"regex": "a"}, forced_token_ids=[1])


# Waiting for a grammar


def kinds(bench: Bench, name: str) -> list[str]:
    return [e.kind for e in bench.events if isinstance(e, ev.Moment) and e.ticket == ticket_of(name)]


def submitted(bench: Bench, *names: str) -> None:
    for name in names:
        bench.submit(name, [1, 2, 3], max_tokens=3, structured_outputs={"regex": name})


def prepared(bench: Bench, name: str, failure: Failure | None = None) -> None:
    bench.apply(cmd.Prepared(ticket_of(name), failure))


def test_one_that_waits_for_its_grammar_holds_up_nobody() -> None:
    bench = Bench()
    submitted(bench, "slow", "fast")
    bench.submit("plain", [4, 5], max_tokens=2)
    prepared(bench, "fast")
    bench.run()
    assert {bench.ended(name).finish_reason for name in ("fast", "plain")} == {"length"}
    assert kinds(bench, "slow") == ["queued", "held"] and not bench.scheduler.can_act
    stats = bench.scheduler.stats()
    assert stats.num_waiting == 1 and stats.num_free_pages == stats.num_pages, "it holds nothing yet"
    detail = next(e.detail for e in bench.events if isinstance(e, ev.Moment) and e.kind == "held")
    assert detail == "its grammar"
    prepared(bench, "slow")
    bench.run()
    assert bench.ended("slow").finish_reason == "length"
    witness("grammar-beside-the-loop", moments=" ".join(kinds(bench, "slow")))


def test_one_whose_grammar_cannot_be_compiled_is_refused_alone() -> None:
    bench = Bench()
    submitted(bench, "bad", "good")
    prepared(bench, "bad", Failure("InvalidValue", "why"))
    assert bench.refused("bad").message == "why" and "bad" not in bench.scheduler.requests.live
    prepared(bench, "good")
    prepared(bench, "good")  # whoever has begun does not mind
    bench.run()
    assert bench.ended("good").finish_reason == "length"
    submitted(bench, "bad")  # the id is free
    assert kinds(bench, "bad")[-1] == "held"


def test_one_that_draws_nothing_waits_for_its_grammar_too() -> None:
    """A wrong one is refused whatever `max_tokens` is."""
    bench = Bench()
    for name in ("bad", "good"):
        bench.submit(name, [1, 2, 3], max_tokens=0, structured_outputs={"regex": name})
        assert kinds(bench, name) == ["queued", "held"]
    prepared(bench, "bad", Failure("InvalidValue", "why"))
    assert bench.refused("bad").message == "why"
    prepared(bench, "good")
    bench.run()
    assert bench.ended("good").finish_reason == "length"


def test_aborted_checkpointed_or_drained_while_it_waits() -> None:
    bench = Bench()
    submitted(bench, "aborted", "taken", "left")
    bench.apply(cmd.Abort(request_ids=["aborted"]))
    assert bench.ended("aborted").finish_reason == "abort"
    prepared(bench, "aborted", Failure("InvalidValue", "too late"))
    told = bench.apply(cmd.TakeCheckpoint(90, "taken", end=True))
    (taken,) = (e.checkpoint for e in told if isinstance(e, ev.Taken))
    assert taken.status == "waiting" and taken.params.structured_outputs == StructuredOutputsParams(regex="taken")
    bench.apply(cmd.Submit(taken.as_request("again", ticket_of("again"), False), taken))
    prepared(bench, "again")
    bench.run()
    assert bench.ended("again").finish_reason == "length"
    told = bench.apply(cmd.Pause(91, "wait"))
    assert not any(isinstance(e, ev.Done) for e in told), "it waits for one that waits"
    prepared(bench, "left")
    bench.run()
    assert bench.ended("left").finish_reason == "length"
    assert any(isinstance(e, ev.Done) and e.ticket == 91 for e in bench.events)


def test_structured_rows_have_one_step_in_flight_and_end_by_the_models_ids() -> None:
    """Their neighbour is planned on; `ignore_eos` leaves them their end."""
    bench = Bench(end_token_ids=tuple(range(16)))
    bench.submit("held", [1, 2, 3], max_tokens=20, ignore_eos=True, seed=1, structured_outputs={"regex": "a"})
    bench.submit("free", [1, 2, 3], max_tokens=20, ignore_eos=True)
    prepared(bench, "held")
    most = {"held": 0, "free": 0}
    while bench.scheduler.num_live:
        for _ in range(3):
            bench.launch()
        for state in bench.scheduler.requests.states.values():
            name = str(state.request.request_id)
            most[name] = max(most[name], state.in_flight)
        bench.commit()
    while bench.in_flight:
        bench.commit()
    assert most["held"] == 1 and most["free"] >= 3
    assert bench.ended("held").finish_reason == "stop" and bench.ended("free").finish_reason == "length"
    witness("grammar-one-step-in-flight", **most)


def test_structured_rows_that_began_apart_go_on_together() -> None:
    """Else each step would be half full for ever: one's turn while the other's token is on its way."""
    bench, widths = Bench(), list[int]()
    for name in ("first", "second"):
        bench.submit(name, [1, 2, 3], max_tokens=12, structured_outputs={"regex": name})
    prepared(bench, "first")
    bench.launch()
    prepared(bench, "second")
    while bench.scheduler.num_live:
        while len(bench.in_flight) < 2 and (plan := bench.launch()) is not None:
            widths.append(len(plan.slot))
        bench.commit()
    assert widths[0] == 1 and widths[1:11] == [2] * 10, widths
    witness("structured-together", steps_of_both=widths.count(2))
