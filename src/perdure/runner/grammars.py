"""Grammars, compiled once for the engine's tokenizer, by what was asked. llguidance does the work.

- Compiling has threads of its own (`compilers`), beside the loop and the runner; the first one also prepares the
  tokenizer.
- What cannot be compiled, and what no text satisfies, is an `InvalidValue` that names field and value.
- A grammar is kept while a request holds it, and the latest ones a while longer.
- llguidance is an extra, and loaded here only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perdure.api.errors import InvalidValue
from perdure.api.structured import StructuredOutputsParams
from perdure.runner.compilers import Compilers
from perdure.runner.ends_named import goes_on_after

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRAMMAR_TIMEOUT_S = 30.0
NUM_IDLE = 64
"""Grammars kept that no request holds."""
SPACE = r"[ ]|\r?\n[ \t]{0,32}"
"""Between the parts of JSON: what people and pretty-printers write, and no more of it, so that a schema that bounds its
values bounds the output."""
TOO_LARGE = (
    "lexer precomputation failed",
    "too many expressions",
    "Too many items",
    "items; max is",
    "Too many states",
)
"""What llguidance says of its limits, which nobody can set here."""
SPELLS_SPECIAL = "what must follow spells the name of a special id, and llguidance takes it for that id"
GOES_ON = "every way through it goes on after an end id that it names, and an end id ends the output"
MISSING = "structured_outputs needs llguidance, which is not installed: pip install 'perdure[structured]'"


@dataclass(slots=True)
class _Entry:
    matcher: Future[LLMatcher]
    num_holders: int = 0


class Grammars:
    """tokenizer_json: the tokenizer in the form of Hugging Face's `tokenizers`, asked once; None = there is none.

    vocab_size: the width of the logits; ids that the tokenizer lacks are never allowed. end_ids: what ends an output.
    timeout_s: how long a grammar may be compiled.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str] | None,
        vocab_size: int,
        end_ids: Sequence[int],
        timeout_s: float = GRAMMAR_TIMEOUT_S,
    ) -> None:
        self.end_ids = tuple(end_ids)
        self.spelled_end_ids: tuple[int, ...] = ()
        """Those that are a piece of text, too: they are an end only where the output is complete. Known once a grammar
        was compiled."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()
        self._entries: dict[StructuredOutputsParams, _Entry] = {}
        """The one held last stands last."""
        self._holds: dict[int, StructuredOutputsParams] = {}
        self._compilers: Compilers[LLMatcher] = Compilers(timeout_s)

    def hold(self, ticket: int, asked: StructuredOutputsParams) -> Future[LLMatcher]:
        """Compile what a request asked, unless that is done; it stays until `release`. The future is done when the
        grammar is ready, or raises `InvalidValue`."""
        with self._lock:
            entry = self._entries.pop(asked, None) or _Entry(self._submit(asked))
            entry.num_holders += 1
            self._entries[asked] = entry
            self._holds[ticket] = asked
        return entry.matcher

    def release(self, ticket: int) -> None:
        with self._lock:
            asked = self._holds.pop(ticket, None)
            if asked is None:
                return
            self._entries[asked].num_holders -= 1
            idle = [other for other, entry in self._entries.items() if not entry.num_holders]
            for other in idle[:-NUM_IDLE]:
                del self._entries[other]

    def matcher(self, asked: StructuredOutputsParams) -> LLMatcher:
        """A new one, at the start of an output. Its grammar is compiled again if nobody holds it any more, as for the
        last step of a request that has ended. Raises `InvalidValue`."""
        with self._lock:
            entry = self._entries.get(asked)
        compiled = (self._submit(asked) if entry is None else entry.matcher).result()
        with self._lock:
            return compiled.deep_copy()

    def close(self) -> None:
        """Cancel what is being compiled, and what waits for it."""
        self._compilers.close()

    def _submit(self, asked: StructuredOutputsParams) -> Future[LLMatcher]:
        return self._compilers.submit(lambda: self._compile(asked), asked.shown)

    def _compile(self, asked: StructuredOutputsParams) -> LLMatcher:
        try:
            import llguidance
        except ImportError:
            raise InvalidValue(MISSING) from None
        tokenizer = self._ready_tokenizer()
        try:
            grammar = _grammar_of(asked)
        except ValueError as error:
            raise InvalidValue(f"{asked.shown}: {_told_briefly(str(error))}") from None
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        ahead = matcher
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask finds what building did not
            ahead = matcher.deep_copy()
            if forced := ahead.compute_ff_tokens():  # where all must follow from here, it may be without end
                ahead.consume_token(forced[0])
        fault = fault_of(matcher) or fault_of(ahead)
        if not fault and asked.kind == "grammar" and goes_on_after(asked.text, self._names_of_ends()):
            fault = GOES_ON
        if fault:
            raise InvalidValue(f"{asked.shown}: {fault}")
        return matcher

    def _names_of_ends(self) -> set[str]:
        """As a grammar may write them. One that is a piece of text is never named."""
        assert self._tokenizer is not None
        ends = [token for token in self.end_ids if token not in self.spelled_end_ids]
        spelled = {self._tokenizer.decode_bytes([token]).decode(errors="replace") for token in ends}
        return spelled | {f"<[{token}]>" for token in ends}

    def _ready_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._tokenizer_lock:
            if self._tokenizer is None:
                if self._tokenizer_json is None:
                    raise InvalidValue("structured_outputs needs text, but the model came without a tokenizer")
                if not self.end_ids:
                    raise InvalidValue("structured_outputs ends with an end id, and this model has none")
                try:
                    self._tokenizer = LLTokenizer(
                        self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=list(self.end_ids)
                    )
                except ValueError as error:
                    raise InvalidValue(f"structured_outputs: this tokenizer cannot be used: {error}") from None
                is_special = self._tokenizer.is_special_token
                self.spelled_end_ids = tuple(token for token in self.end_ids if not is_special(token))
            return self._tokenizer


def fault_of(matcher: LLMatcher) -> str:
    """Why an output cannot go on, once its mask was computed; empty if it can, or is complete."""
    return _told_briefly(matcher.get_error()) if matcher.is_error() else ""


def _grammar_of(asked: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher, grammar_from

    match asked.kind:
        case "json":
            compact = asked.disable_any_whitespace
            options: Any = {"whitespace_flexible": False} if compact else {"whitespace_pattern": SPACE}
            schema = json.loads(asked.text)
            if isinstance(schema, bool):  # it puts its options into an object
                schema = {"allOf": [schema]}
            return LLMatcher.grammar_from_json_schema(schema, defaults=options)
        case "regex":
            return LLMatcher.grammar_from_regex(asked.text)
        case "choice":
            choices = " | ".join(json.dumps(one) for one in dict.fromkeys(asked.choice or ()))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n")
        case "grammar":
            return grammar_from("grammar", asked.text)


def _told_briefly(message: str) -> str:
    """The line of llguidance's message that says what is wrong; the others show where, in its own notation."""
    if message.startswith("NoExtensionBias"):
        return "nothing can follow that satisfies it"
    if "Too many items" in message and "ff_tokens" in message:
        return "what must follow is endless, or too long to be kept track of"
    if "doesn't satisfy the grammar; forced bytes" in message:
        return SPELLS_SPECIAL
    if any(sign in message for sign in TOO_LARGE):
        return "it is too large to be kept track of: fewer or shorter repetitions and alternatives are needed"
    lines = [line.strip() for line in message.splitlines() if line.strip() and "<non-verbose/>" not in line]
    at_fault = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (at_fault or lines or ["it cannot be compiled"])[0].replace("panic: ", "llguidance gave up: ")
