"""`logprobs`: a text, or what follows one, scored without generating: one prefill, raw scores, however long it is.

A continuation is scored as the end of a prompt, and its scores are then shown as those of an output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from perdure.api.errors import InvalidValue
from perdure.api.output import RequestOutput
from perdure.api.sampling import SamplingParams
from perdure.engine.prompts import Prompt, PromptOrError, as_batch, salt_of, token_ids_of
from perdure.engine.tokenizer import Tokenizer

SCORING = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)


class Scoring:
    """What one call asks: `prompts` are to be run with `SCORING`, `shown` turns their results into the call's.

    bare: one prompt was given, not a list. An error stands in place of a prompt that is wrong,
    or whose continuation is.
    """

    def __init__(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt] | None,
        tokenizer: Tokenizer | None,
        vocab_size: int,
    ) -> None:
        batch, self.bare = as_batch(prompts)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tails = None if continuations is None else self._ids_of(continuations, len(batch))
        tails: Sequence[list[int] | InvalidValue] = self._tails or [[] for _ in batch]
        self.prompts = [self._joined(prompt, tail) for prompt, tail in zip(batch, tails, strict=True)]

    def shown(self, results: list[RequestOutput]) -> list[RequestOutput]:
        if self._tails is None:
            return results
        return [self._continued(*one) for one in zip(results, self.prompts, self._tails, strict=True)]

    def _ids_of(self, given: Prompt | Sequence[Prompt], count: int) -> list[list[int] | InvalidValue]:
        batch, _ = as_batch(given)
        if len(batch) != count:
            raise InvalidValue(f"continuations has {len(batch)} entries for {count} prompts")
        return [self._tail(at, one) for at, one in enumerate(batch)]

    def _tail(self, at: int, given: Prompt) -> list[int] | InvalidValue:
        try:
            ids = token_ids_of(given, self._tokenizer, add_special_tokens=False)[0]
        except InvalidValue as error:
            return InvalidValue(f"continuations[{at}]: {error}")
        for position, token in enumerate(ids):
            if not 0 <= token < self._vocab_size:
                limits = f"is not a token id of this model: 0 to {self._vocab_size - 1}"
                return InvalidValue(f"continuations[{at}][{position}]={token} {limits}")
        return ids

    def _joined(self, prompt: Prompt, tail: list[int] | InvalidValue) -> PromptOrError:
        try:
            head, salt = token_ids_of(prompt, self._tokenizer)[0], salt_of(prompt)
        except InvalidValue as error:
            return error
        if isinstance(tail, InvalidValue):
            return tail
        return {"prompt_token_ids": head + tail if head else [], "cache_salt": salt}

    def _continued(self, result: RequestOutput, whole: PromptOrError, tail: list[int] | InvalidValue) -> RequestOutput:
        """The scores of a prompt's last tokens as those of an output: of as many as were scored before it ended."""
        found = result.prompt_logprobs
        if found is None or result.error is not None:
            return result
        assert isinstance(whole, Mapping) and isinstance(tail, list)
        first, num_scored = len(whole["prompt_token_ids"]) - len(tail) - 1, found.num_scored
        scores = found.cut(min(first, num_scored), num_scored)
        scores.spell = found.spell
        token_ids = tail[: scores.num_scored]
        text = "" if self._tokenizer is None else self._tokenizer.decode(token_ids)
        output = replace(result.outputs[0], text=text, token_ids=token_ids, logprobs=scores)
        return replace(result, outputs=[output], prompt_logprobs=None)
