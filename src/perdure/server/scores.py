"""Scores in OpenAI's forms. Columns go in, numbers that JSON has come out: minus infinity is -9999."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from perdure.api.scores import Logprob, TokenScores
from perdure.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, TokenLogprob
from perdure.server.protocol.common import PromptLogprobs, ScoredToken
from perdure.server.protocol.completions import Logprobs

SCORE_OF_NOTHING = -9999.0

Entry = dict[int, Logprob]


class Cursor(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...


class Spelling(Protocol):
    def bytes_of(self, token_id: int) -> bytes: ...

    def cursor(self, skip_special_tokens: bool) -> Cursor: ...


class Tokenizer(Protocol):
    """What is asked of a model's tokenizer here."""

    @property
    def spelling(self) -> Spelling | None: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def number(score: float) -> float:
    return SCORE_OF_NOTHING if score == -math.inf else score


def prompt_logprobs(scores: TokenScores | None) -> PromptLogprobs | None:
    if scores is None:
        return None
    return [
        None
        if entry is None
        else {
            str(i): ScoredToken(logprob=number(p.logprob), rank=p.rank, decoded_token=p.decoded_token)
            for i, p in entry.items()
        }
        for entry in scores
    ]


class Names:
    """How tokens are called in scores: by their text, which for bytes that are no text is "bytes:\\xf0\\x9f", or by
    "token_id:42" where that was asked, or where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, by_id: bool) -> None:
        self._tokenizer = tokenizer
        self._by_id = by_id or tokenizer is None

    def bytes_of(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return b""
        if tokenizer.spelling is not None:
            return tokenizer.spelling.bytes_of(token_id)
        return tokenizer.decode([token_id], False).encode()

    def name(self, token_id: int) -> str:
        if self._by_id:
            return f"token_id:{token_id}"
        spelled = self.bytes_of(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class CompletionScores:
    """The `logprobs` of one choice of a completion, part by part; offsets go on from one to the next."""

    def __init__(self, names: Names, pushed_text: Callable[[int], str]) -> None:
        self._names = names
        self._pushed_text = pushed_text
        self._offset = 0

    def part(self, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> Logprobs:
        """entries: one a token; None for a prompt's first."""
        name, found = self._names.name, Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, entry in zip(token_ids, entries, strict=True):
            found.tokens.append(name(token_id))
            found.text_offset.append(self._offset)
            self._offset += len(self._pushed_text(token_id))
            found.token_logprobs.append(None if entry is None else number(entry[token_id].logprob))
            found.top_logprobs.append(
                None if entry is None else {name(one): number(score.logprob) for one, score in entry.items()}
            )
        return found


def text_pusher(tokenizer: Tokenizer | None, skip_special_tokens: bool) -> Callable[[int], str]:
    """Gives, id by id, the text that becomes certain with it."""
    if tokenizer is None:
        return lambda _: ""
    if tokenizer.spelling is None:
        return lambda token_id: tokenizer.decode([token_id], skip_special_tokens)
    cursor = tokenizer.spelling.cursor(skip_special_tokens)
    return lambda token_id: cursor.push([token_id])


def chat_logprobs(
    names: Names, token_ids: Sequence[int], scores: TokenScores, num_top: int, listed_ids: Collection[int]
) -> ChatLogprobs:
    """num_top: how many of the best are shown of each; -1 = all. listed_ids: shown beside them."""
    content = []
    for token_id, entry in zip(token_ids, scores, strict=True):
        assert entry is not None
        top = [
            _scored(names, one, score)
            for one, score in entry.items()
            if num_top < 0 or score.rank <= num_top or one in listed_ids
        ]
        chosen = _scored(names, token_id, entry[token_id])
        content.append(
            ChatTokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top)
        )
    return ChatLogprobs(content=content)


def _scored(names: Names, token_id: int, score: Logprob) -> TokenLogprob:
    return TokenLogprob(token=names.name(token_id), logprob=number(score.logprob), bytes=list(names.bytes_of(token_id)))
