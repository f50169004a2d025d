"""`RequestState`: everything the engine knows about one request, and the only mutable thing about it.

- `tokens` is prompt and output, append-only; stops, text, prefix keys and results all read this one list.
- Lengths: known = len(tokens); planned = positions covered once every launched step has run; computed = committed.
- `in_flight` is written by plan (+) and commit (-), nowhere else.
- What the device holds for it (slot, pages, planned, computed) starts anew with each residency; records never do.
"""

from __future__ import annotations

from perdure.api.event import Failure, FinishReason, Record, StopMatch
from perdure.api.request import Request
from perdure.api.sampling import LogprobsMode
from perdure.api.scores import TokenScores
from perdure.core.lifecycle import FINAL, REQUEST_MOVES, Status, moved
from perdure.core.prefix import Node
from perdure.core.stopping import StopRule

NO_SLOT = -1


class RequestState:
    """One live request. order: (priority, arrival), lower first; arrival is also its serial number."""

    __slots__ = (
        "arrival",
        "awaits",
        "epochs",
        "exact",
        "in_flight",
        "logprobs_mode",
        "nodes",
        "num_cached",
        "num_checkpoints",
        "num_computed",
        "num_evictions",
        "num_pauses",
        "num_planned",
        "num_residencies",
        "order",
        "pages",
        "paused_at",
        "prefill_end",
        "prompt_scores",
        "replay",
        "request",
        "scores",
        "seed",
        "slot",
        "status",
        "stops",
        "tokens",
        "tried_at",
        "waits_for",
    )

    def __init__(self, request: Request, arrival: int, seed: int, logprobs_mode: LogprobsMode, stops: StopRule) -> None:
        params = request.params
        self.request = request
        self.arrival = arrival
        self.order = (params.priority, arrival)
        self.seed = seed
        self.logprobs_mode = logprobs_mode
        self.stops = stops
        self.status = Status.WAITING
        self.waits_for = "" if params.structured_outputs is None else "its grammar"
        """What is made ready beside the loop before it may begin (`command.Prepared` says when); empty = nothing."""
        self.tokens = list(request.prompt_token_ids)
        self.scores = TokenScores(listed_ids=params.logprob_token_ids) if params.asks_scores else None
        self.prompt_scores = None if params.prompt_logprobs is None else TokenScores(leading_none=True)
        self.in_flight = 0
        self.num_cached = 0
        self.num_pauses = 0
        self.num_evictions = 0
        self.num_checkpoints = 0
        """How many checkpoints it has gone on from."""
        self.num_residencies = 0
        self.epochs: list[tuple[int, int]] = []
        """Where other weights took over: (first output index, epoch)."""
        self.exact = True
        """Nothing weakened the promise that its bits are those of the undisturbed run: no KV of several weights, no way
        between unequal fingerprints."""
        self.paused_at = 0
        """The latest pause, counted over all requests."""
        self.replay: int | None = None
        """Its place among those to be computed again, while in the queue (`core.queue`)."""
        self.tried_at = -1
        """Version of the page pool at which it last did not fit."""
        self.leave_device()

    def leave_device(self) -> None:
        """Nothing of it is on the device any more."""
        self.slot = NO_SLOT
        self.pages: list[int] = []
        self.nodes: list[Node] | None = None
        """Nodes of the prefix index for its first full pages: found while it waits; found and published while it is
        resident, where None = it publishes nothing."""
        self.awaits = False
        """Whether it was passed over because another computes pages of its prompt."""
        self.num_planned = 0
        self.num_computed = 0
        self.prefill_end = 0
        """Positions whose tokens the host gives in this residency; after them the device's own tokens follow."""

    def move(self, to: Status) -> None:
        self.status = moved(REQUEST_MOVES, self.status, to)

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def is_resident(self) -> bool:
        return self.slot != NO_SLOT

    @property
    def needs_host(self) -> bool:
        """Whether the host has a say between its tokens: it then has one step in flight at most."""
        return bool(self.request.params.logits_processors) or self.request.params.structured_outputs is not None

    @property
    def prompt_length(self) -> int:
        return self.stops.prompt_length

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.stops.prompt_length

    @property
    def last_position(self) -> int:
        """Positions that will ever be computed: the last token of the budget is sampled, never computed."""
        return self.stops.prompt_length + self.stops.max_output - 1

    def stamp(self, first: int, epoch: int) -> None:
        """Output tokens from this index on come from the weights of this epoch."""
        if not self.epochs or self.epochs[-1][1] != epoch:
            self.epochs.append((first, epoch))

    def forget_prompt_scores(self) -> None:
        """They are asked anew: other weights compute the prompt again, and no token was drawn after the old ones."""
        if self.prompt_scores is not None and not self.num_output:
            self.prompt_scores = TokenScores(leading_none=True)

    @property
    def has_begun(self) -> bool:
        """Whether anything of it is recorded: a token or a score."""
        return self.num_output > 0 or (self.prompt_scores is not None and self.prompt_scores.num_scored > 0)

    @property
    def num_prompt_scores_missing(self) -> int:
        """Prompt tokens whose score was asked and is not recorded yet."""
        if self.prompt_scores is None:
            return 0
        return self.stops.prompt_length - 1 - self.prompt_scores.num_scored

    def check(self) -> None:
        """What belongs to a position is there for each, and for none twice. Raises AssertionError."""
        known = len(self.tokens)
        assert 0 <= self.num_computed <= self.num_planned <= max(known + self.in_flight, self.num_computed)
        assert self.prompt_length <= known and self.num_output <= self.stops.max_output
        if self.scores is not None:
            assert self.scores.num_scored == self.num_output
        if self.prompt_scores is not None:
            num_scored = self.prompt_scores.num_scored
            assert num_scored <= self.prompt_length - 1 and not (self.num_output and self.num_prompt_scores_missing)

    def record(self, reason: FinishReason, stop: StopMatch | None, failure: Failure | None) -> Record:
        """The one place where a result is built from a request; everything in it is a copy."""
        return Record(
            request_id=self.request.request_id,
            arrival=self.arrival,
            seed=self.seed,
            prompt_token_ids=list(self.request.prompt_token_ids),
            token_ids=self.tokens[self.stops.prompt_length :],
            finish_reason=reason,
            stop=stop,
            scores=None if self.scores is None else self.scores.copy(),
            prompt_scores=None if self.prompt_scores is None else self.prompt_scores.copy(),
            exact=self.exact,
            num_cached_tokens=self.num_cached,
            num_pauses=self.num_pauses,
            num_evictions=self.num_evictions,
            num_checkpoints=self.num_checkpoints,
            weight_epochs=list(self.epochs),
            failure=failure,
        )
