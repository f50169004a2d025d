"""`Group`: one submitted request. Its children are the samples of its one prompt, and live and end each for itself.

- Most requests have one child. What is the request's and not a sample's stands here: seed, scores of the prompt, what
  of it was cached.
- With several, one child computes the prompt and the others are held back, outside the queue. When the prompt is
  committed they begin with its pages: full ones by reference, what is left by a copy of the beginning of a page. At
  least one position is left to each: the one that its first token is drawn from.
- A child that may draw one token ends when the prompt is committed, so nobody could begin with its pages. Once the
  first has ended, its siblings wait no more: each computes what the prefix cache has not.
- Which child computes the prompt does not show. It may end or be put aside at any time: then another one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from perdure.api.request import Request
from perdure.api.sampling import LogprobsMode
from perdure.api.scores import TokenScores

if TYPE_CHECKING:
    from perdure.core.state import RequestState


class Fork(NamedTuple):
    """What a child begins with of its sibling `source`: full pages, and num_copied positions of the page after them."""

    source: RequestState
    pages: list[int]
    num_copied: int


class Group:
    """children: by index; they stay when they have ended, for checkpoints. num_left: those that have not."""

    __slots__ = (
        "children",
        "has_old_scores",
        "held",
        "logprobs_mode",
        "num_cached",
        "num_checkpoints",
        "num_left",
        "num_residencies",
        "prompt_scores",
        "request",
        "residents",
        "seed",
        "waits_for",
    )

    def __init__(self, request: Request, seed: int, logprobs_mode: LogprobsMode) -> None:
        self.request = request
        self.seed = seed
        self.logprobs_mode = logprobs_mode
        self.prompt_scores: TokenScores | None = None
        self.forget_prompt_scores()
        self.has_old_scores = False
        """The prompt's scores may be of other weights than those of now."""
        self.waits_for = "" if request.params.structured_outputs is None else "its grammar"
        """What is made ready beside the loop before it may begin (`command.Prepared` says when); empty = nothing."""
        self.num_cached = 0
        self.num_checkpoints = 0
        """How many checkpoints it has gone on from."""
        self.num_residencies = 0
        """How often a child was given a slot."""
        self.children: list[RequestState] = []
        self.num_left = 0
        self.residents: list[RequestState] = []
        """Children with a slot, the longest resident first."""
        self.held: dict[int, RequestState] = {}
        """Waiting children that are not in the queue, by index: another one computes the prompt, or will."""

    def add(self, child: RequestState) -> None:
        self.children.append(child)
        self.num_left += 1

    @property
    def order(self) -> tuple[int, int]:
        return self.children[0].order

    @property
    def ends_at_once(self) -> bool:
        """Whether there is nothing to draw and nothing to score."""
        return self.children[0].stops.max_output == 0 and not self.num_prompt_scores_missing

    @property
    def has_output(self) -> bool:
        return any(child.num_output for child in self.children)

    @property
    def num_prompt_scores_missing(self) -> int:
        """Prompt tokens whose score was asked and is not recorded yet."""
        if self.prompt_scores is None:
            return 0
        return len(self.request.prompt_token_ids) - 1 - self.prompt_scores.num_scored

    def take_weights(self) -> None:
        """Other weights compute from now on. Prompt scores that no token was drawn after are asked anew."""
        if self.residents or self.has_output:
            self.has_old_scores = True
        else:
            self.forget_prompt_scores()

    def forget_prompt_scores(self) -> None:
        if self.request.params.prompt_logprobs is not None:
            self.prompt_scores = TokenScores(leading_none=True)

    # Sharing the prompt

    def must_wait(self, child: RequestState) -> bool:
        """Whether this waiting child has to leave the prompt to another one now, so that nothing is computed or scored
        twice. That one is resident, or has steps in flight."""
        if self._is_each_for_itself:
            return False
        if self.residents:
            return not any(_has_prompt(one) for one in self.residents)
        if not self.num_prompt_scores_missing:
            return False
        return any(one.in_flight for one in self.children if one is not child and not one.is_final)

    def let_go(self) -> list[RequestState]:
        """Held children that need wait no more: all once the prompt is there, or was there for children that end with
        it, and one if nobody else would compute it."""
        if not self.held or (self.num_left > len(self.held) and not any(_has_prompt(one) for one in self.residents)):
            return []
        all_go = self.residents or self._is_each_for_itself
        freed = list(self.held.values()) if all_go else [next(iter(self.held.values()))]
        for child in freed:
            del self.held[child.child]
        return freed

    @property
    def _is_each_for_itself(self) -> bool:
        """Whether children end with the prompt, and one has."""
        has_ended = self.num_left < len(self.children)
        return has_ended and self.children[0].stops.max_output == 1 and not self.num_prompt_scores_missing

    def fork_for(self, child: RequestState, num_found: int, page_size: int) -> Fork | None:
        """What of the prompt this waiting child can take from a sibling, if that is more than the cached pages found;
        one position is left to compute."""
        limit = min(child.prompt_length, len(child.tokens) - 1, child.last_position - 1)
        source = next((one for one in self.residents if _has_prompt(one)), None)
        if source is None:
            return None
        num_positions = min(limit, source.num_computed)
        if num_positions <= num_found * page_size:
            return None
        num_full, num_copied = divmod(num_positions, page_size)
        return Fork(source, source.pages[:num_full], num_copied)

    def check(self) -> None:
        """Raises AssertionError."""
        living = [child for child in self.children if not child.is_final]
        assert len(living) == self.num_left and [child.child for child in self.children] == [*range(len(self.children))]
        assert sorted(child.order for child in living if child.is_resident) == sorted(s.order for s in self.residents)
        assert not self.held or len(self.held) < self.num_left, "children are held back by nobody"
        assert all(not child.is_final and not child.is_resident for child in self.held.values())


def _has_prompt(child: RequestState) -> bool:
    """Whether all of the prompt that others can use is committed."""
    return child.num_computed >= child.prompt_length - 1
