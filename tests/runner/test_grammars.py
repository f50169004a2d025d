"""Grammars and their masks, without a model: random walks through what was asked end in what was asked."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.api.errors import InvalidValue
from perdure.api.grammar_limits import MAX_BRACKETS, MAX_PARTS, MAX_REPEATS, MAX_RULES
from perdure.api.structured import StructuredOutputsParams
from perdure.engine.tokenizer import Tokenizer, load_tokenizer
from perdure.models.tiny import EOS_ID, make_tiny_llama
from perdure.ops.adjust import NO_IDS, StepAdjustments, adjust
from perdure.runner.ends_named import goes_on_after
from perdure.runner.grammars import NUM_IDLE, SPELLS_SPECIAL, Grammars
from perdure.runner.masks import Masks, Walk, Wanted
from tests.engine.test_spelling import llama_bpe
from tests.structures import ASKED, satisfies
from tests.witness import witness

PADDING = 45
"""Ids of the model that its tokenizer lacks; V is no multiple of a word."""
LONGEST = 300


class Held:
    """A tokenizer with grammars for a model whose logits are wider."""

    def __init__(self, tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.num_ids = tokenizer.vocab_size
        self.vocab_size = tokenizer.vocab_size + PADDING
        self.grammars = Grammars(tokenizer.to_json, self.vocab_size, end_ids)
        self.masks = Masks(self.grammars, self.vocab_size)
        self.tickets = 0

    def ready(self, **asked: Any) -> StructuredOutputsParams:
        """Raises what is wrong with it."""
        params = StructuredOutputsParams(**asked)
        self.tickets += 1
        self.grammars.hold(self.tickets, params).result(timeout=60)
        return params

    def allowed(self, walk: Walk, output: list[int]) -> list[int]:
        """Ids after an output, which stands behind a prompt of two tokens. Raises what the row's error says."""
        self.masks.begin([Wanted(3, walk, [1, 2, *output], 2)])
        found, failed = self.masks.take(np.array([5, 3]))
        if failed:
            raise AssertionError(failed[1])
        assert found is not None and found.row.tolist() == [1]
        no_change = StepAdjustments(NO_IDS, np.empty(0, np.float32), NO_IDS, NO_IDS, None, NO_IDS, found)
        x = adjust(np.zeros((2, self.vocab_size), np.float32), no_change)
        assert not x[0].any(), "a neighbour's logits are left alone"
        return np.flatnonzero(np.isfinite(x[1])).tolist()

    def text_of(self, output: list[int]) -> str:
        """Behind a letter, since some decoders take one space off the beginning of a text."""
        letter = self.tokenizer.encode("z", False)
        return self.tokenizer.decode(letter + output, True).removeprefix(self.tokenizer.decode(letter, True))

    def close(self) -> None:
        self.masks.close()
        self.grammars.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    tokenizer = load_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("tiny")))
    (spelled,) = tokenizer.encode("z", False)
    held = Held(tokenizer, (EOS_ID, spelled))  # as models have whose generation config names an id of text
    yield held
    held.close()


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """SentencePiece's way: spaces are letters, bytes spell what has no piece."""
    tokenizer = llama_bpe(tmp_path_factory.mktemp("llama"))
    assert tokenizer.eos_token_id is not None
    held = Held(tokenizer, (tokenizer.eos_token_id,))
    yield held
    held.close()


def walk_through(held: Held, params: StructuredOutputsParams, rng: random.Random, ends_last: bool) -> list[int] | None:
    """A random output that the masks allow, checked on its way; None if it got too long."""
    walk, output = Walk(params, ends_last), list[int]()
    while len(output) < LONGEST:
        allowed = held.allowed(walk, output)
        assert allowed and max(allowed) < held.num_ids, "ids of no text are never allowed"
        ends = [token for token in allowed if token in held.grammars.end_ids]
        assert not (ends_last and ends) or len(ends) == len(allowed)
        if rng.random() < 0.2:
            assert held.allowed(Walk(params, ends_last), output) == allowed, "a walk is a function of the output"
        token = rng.choice(ends) if ends and rng.random() < 0.3 else rng.choice(allowed)
        if token in held.grammars.end_ids:
            return output
        output.append(token)
    return None


@pytest.mark.parametrize("kind", ["tiny", "spaced"])
def test_walks_end_in_what_was_asked(kind: str, request: pytest.FixtureRequest, soak_factor: int) -> None:
    """Over random schemas, patterns and choices: whatever is drawn of what the masks allow, the end is right."""
    held: Held = request.getfixturevalue(kind)
    ended, tokens = 0, 0

    @given(ASKED, st.integers(0, 2**32), st.booleans())
    def property_holds(asked: dict[str, Any], seed: int, ends_last: bool) -> None:
        nonlocal ended, tokens
        try:
            params = held.ready(**asked)
        except InvalidValue as error:
            assert SPELLS_SPECIAL in str(error)
            return
        output = walk_through(held, params, random.Random(seed), ends_last)
        if output is not None:
            ended, tokens = ended + 1, tokens + len(output)
            text = held.text_of(output)
            assert satisfies(text, asked), (asked, text)

    property_holds()
    assert ended >= 90 * soak_factor
    witness(f"structured-walks-{kind}", ended=ended, tokens=tokens)


def test_a_text_that_spells_the_name_of_a_special_id_is_refused(spaced: Held) -> None:
    with pytest.raises(InvalidValue, match=r'structured_outputs.choice=\["<s>"\]: what must follow spells the name'):
        spaced.ready(choice=["<s>"])


def test_what_only_an_end_id_spells_cannot_be_written(tiny: Held) -> None:
    with pytest.raises(AssertionError, match=r"end id \d+, and the output would end incomplete there"):
        tiny.allowed(Walk(tiny.ready(choice=["z"]), False), [])


@pytest.mark.parametrize("name", ["</s>", f"<[{EOS_ID}]>"])
def test_an_end_id_that_a_grammar_names_ends_what_is_complete(name: str, tiny: Held) -> None:
    """It is drawn where nothing follows it, left out beside another way, and an error where it is the only one."""
    letters = {letter: tiny.tokenizer.encode(letter, False)[0] for letter in "ab"}
    after_a = {
        f'start: "a" {name}': [EOS_ID],
        f'start: "a" ({name} "b")?': [EOS_ID],
        f'start: "a" ({name} "b" | "b")': [letters["b"]],
    }
    for grammar, allowed in after_a.items():
        walk = Walk(tiny.ready(grammar=grammar), ends_last=False)
        assert [token for token in tiny.allowed(walk, [letters["a"]]) if token in (EOS_ID, letters["b"])] == allowed
    hidden = Walk(tiny.ready(grammar=f'start: "a" ("b" {name} "c" | "d")'), ends_last=False)
    with pytest.raises(AssertionError, match=f"end id {EOS_ID}, and the output would end incomplete"):
        tiny.allowed(hidden, [letters["a"], letters["b"]])


A_WAY = [
    'start: "a" END',
    'start: "a" (END "b")?',
    'start: "a" (END "b" | "b")',
    'start: a b\na: "x" END\nb: "y"?',
    'start: "a" END /y*/',
    'start: a+\na: "x" END',
    'start: ("a" | "b") END "c"\n  | "d"',
    'start: "a" END ("b"){0,3}',
    'start: ("a" | "b") start',
]
NO_WAY = [
    'start: END "b"',
    'start: "a" END "b"',
    'start: "a" END "b" // for now',
    'start: a b\na: "x" END\nb: "y"',
    'start: TEXT END "x"\nTEXT: /a+/',
    'start: ("a" | "b") END "c" | "d" END "e"',
    'start: "a" start | END "x"',
    'start: "a" END ("b"){1,3}',
    'start: %json {"type": "object"} END "x"',
]


@pytest.mark.parametrize("name", ["</s>", f"<[{EOS_ID}]>"])
def test_a_grammar_that_only_goes_on_after_an_end_id_is_refused(name: str, tiny: Held) -> None:
    for grammar in A_WAY:
        assert not goes_on_after(grammar.replace("END", name), {name}), grammar
    for grammar in NO_WAY:
        with pytest.raises(InvalidValue, match=r"structured_outputs\.grammar=.*goes on after an end id that it names"):
            tiny.ready(grammar=grammar.replace("END", name))


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "strin"}}, 'structured_outputs.json={"type": "strin"}: Invalid type: strin'),
    ({"json": {"type": "integer", "minimum": "x"}}, "minimum"),
    ({"json": {"type": "string", "minLength": 5, "maxLength": 3}}, "minLength (5) is greater than maxLength (3)"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
    ({"json": {"type": "array", "minItems": 5, "maxItems": 3}}, "minItems (5) is greater than maxItems (3)"),
    ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "incompatible types"),
    ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "required property 'a'"),
    ({"json": {"enum": []}}, "is empty"),
    ({"json": "false"}, "structured_outputs.json=false: Unsatisfiable schema"),
    ({"json": {"$ref": "#/definitions/x"}}, "/definitions/x"),
    ({"json": {"not": {"type": "integer"}}}, 'Unimplemented keys: ["not"]'),
    ({"regex": "[a-z"}, "structured_outputs.regex='[a-z': unclosed character class"),
    ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": r"[^\s\S]"}, "nothing can follow that satisfies it"),
    ({"regex": "a?" * MAX_REPEATS}, "too large to be kept track of"),
    ({"grammar": "start: x"}, "structured_outputs.grammar='start: x': at 1(8): unknown name: \"x\""),
    ({"grammar": 'start: start "a"'}, "nothing can follow that satisfies it"),
    ({"grammar": 'start: "a" start'}, "what must follow is endless, or too long"),
    ({"grammar": 'root ::= "a" other\nother ::= "b" root'}, "what must follow is endless, or too long"),
    ({"grammar": " \n"}, "No 'root' rule found"),
    ({"grammar": 'root ::= "a'}, "Unexpected end of input"),
    ({"grammar": 'other ::= "a"'}, "No 'root' rule found"),
]


@pytest.mark.parametrize(("asked", "named"), IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_what_cannot_be_is_refused_by_name(asked: dict[str, Any], named: str, tiny: Held) -> None:
    with pytest.raises(InvalidValue) as caught:
        tiny.ready(**asked)
    message = str(caught.value)
    assert message.startswith(f"structured_outputs.{next(iter(asked))}=") and named in message, message
    assert "\n" not in message and len(message) < 500


def test_without_llguidance_the_error_names_the_extra(tiny: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidValue, match=r"pip install 'perdure\[structured\]'"):
        tiny.ready(regex="never seen before")


@pytest.mark.parametrize(
    ("tokenizer_json", "end_ids", "named"),
    [
        (None, (1,), "the model came without a tokenizer"),
        (lambda: "{}", (1,), "this tokenizer cannot be used: error loading tokenizer"),
        (lambda: "{}", (), "this model has none"),
    ],
)
def test_what_a_grammar_needs(tokenizer_json: Callable[[], str] | None, end_ids: tuple[int, ...], named: str) -> None:
    grammars = Grammars(tokenizer_json, 100, end_ids)
    with pytest.raises(InvalidValue, match=named):
        grammars.hold(1, StructuredOutputsParams(regex="a")).result(timeout=60)
    grammars.close()


def test_a_grammar_is_compiled_once_and_kept_while_it_is_held(tiny: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, gate = list[str](), threading.Event()
    compile_one = tiny.grammars._compile

    def counted(asked: StructuredOutputsParams) -> Any:
        compiled.append(asked.text)
        assert gate.wait(60)
        return compile_one(asked)

    monkeypatch.setattr(tiny.grammars, "_compile", counted)
    first = StructuredOutputsParams(regex="kept")
    futures = [tiny.grammars.hold(1000 + at, first) for at in range(3)]
    assert not futures[0].done(), "nobody waits for it but who asked"
    gate.set()
    assert len({future.result(timeout=60) for future in futures}) == 1 and compiled == ["kept"]
    for at in range(NUM_IDLE + 5):
        tiny.grammars.hold(2000 + at, StructuredOutputsParams(regex=f"x{at}")).result(timeout=60)
        tiny.grammars.release(2000 + at)
    tiny.grammars.hold(1003, first).result()
    assert compiled.count("kept") == 1, "somebody holds it all the time"
    tiny.grammars.release(1999)  # of no request that asked
    tiny.grammars.hold(3000, StructuredOutputsParams(regex="x0")).result(timeout=60)
    assert compiled.count("x0") == 2, "of those that nobody holds the latest are kept"
    walk = Walk(StructuredOutputsParams(regex="forgotten"), ends_last=False)
    assert tiny.allowed(walk, []) and "forgotten" in compiled  # the last step of a request that has ended


def test_a_row_that_left_its_grammar_fails_alone(tiny: Held) -> None:
    """As one whose checkpoint holds another's tokens would."""
    asked = tiny.ready(regex="[0-9]+")
    good, bad = Walk(asked, False), Walk(asked, False)
    digits, letters = tiny.tokenizer.encode("12", False), tiny.tokenizer.encode("ab", False)
    for output in (letters, [*letters, *digits]):
        tiny.masks.begin([Wanted(0, good, digits, 0), Wanted(1, bad, output, 0)])
        found, failed = tiny.masks.take(np.array([0, 1]))
        assert found is not None and found.row.tolist() == [0]
        assert set(failed) == {1} and failed[1].kind == "NothingToSample"
        assert "structured_outputs.regex='[0-9]+': " in failed[1].message


def test_masks_of_a_step_that_failed_are_not_the_next_ones(tiny: Held) -> None:
    asked = tiny.ready(regex="[0-9]+")
    tiny.masks.begin([Wanted(0, Walk(asked, False), [], 0)])  # and never taken
    tiny.masks.begin([])
    assert tiny.masks.take(np.array([0])) == (None, {})


def test_the_tokenizers_end_id_is_not_the_models(tmp_path: Path) -> None:
    """What ends an output is what the engine says, wherever the tokenizer sees an end."""
    tokenizer = load_tokenizer(make_tiny_llama(tmp_path))
    held = Held(tokenizer, (300,))
    assert held.allowed(Walk(held.ready(choice=["a"]), False), tokenizer.encode("a", False)) == [300]
    held.close()


CHAINED: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "properties": (3, lambda inner: {"type": "object", "properties": {"x": inner}}),
    "items": (2, lambda inner: {"items": inner}),
    "additional": (2, lambda inner: {"additionalProperties": inner}),
    "all": (2, lambda inner: {"allOf": [inner]}),
    "any": (3, lambda inner: {"anyOf": [inner, {"type": "null"}]}),
    "alone": (1, lambda inner: {**inner, "title": "x"}),
}
"""How a schema leads on to the next, and how many objects and lists that takes."""


@pytest.mark.parametrize("kind", CHAINED)
def test_a_schema_nested_as_deep_as_the_limits_allow_is_compiled(kind: str, tiny: Held) -> None:
    """A thread's usual stack overflows here, which ends the process."""
    num_parts, leading_to = CHAINED[kind]
    count = (MAX_PARTS - 10) // (num_parts + 1)
    chain = {f"a{n}": leading_to({"$ref": f"#/$defs/a{n + 1}"}) for n in range(count)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {"type": "integer"}}}
    assert tiny.allowed(Walk(tiny.ready(json=schema), False), [])


@pytest.mark.parametrize(
    "grammar",
    [
        "start: r1\n"
        + "".join(f'r{n}: "a" r{n + 1} "b"\n' for n in range(1, MAX_RULES - 1))
        + f'r{MAX_RULES - 1}: "x"',
        "start: T1\n"
        + "".join(f'T{n}: "a" T{n + 1} "b"\n' for n in range(1, MAX_RULES - 1))
        + f'T{MAX_RULES - 1}: "x"',
        f'start: {"(" * MAX_BRACKETS}"a"{")" * MAX_BRACKETS}',
        f'root ::= {"(" * MAX_BRACKETS}"a"{")" * MAX_BRACKETS}',
    ],
    ids=["rules", "terminals", "brackets", "gbnf"],
)
def test_a_grammar_as_deep_as_the_limits_allow_is_compiled_and_walked(grammar: str, tiny: Held) -> None:
    walk, output = Walk(tiny.ready(grammar=grammar), False), list[int]()
    for _ in range(20):
        allowed = tiny.allowed(walk, output)
        output.append(next(iter(token for token in allowed if token not in tiny.grammars.end_ids), allowed[0]))
        if output[-1] in tiny.grammars.end_ids:
            break
