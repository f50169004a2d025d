"""`RequestState`: everything the engine knows about one sample of a request, and the only mutable thing about it.

What the samples of one request share is their `Group`.

- `tokens` is prompt and output, append-only; stops, text, prefix keys and results all read this one list.
- Lengths: known = len(tokens); planned = positions covered once every launched step has run; computed = committed.
- `in_flight` and `in_flight_tokens` are written by plan (+) and commit (-), nowhere else.
- What the device holds for it (slot, pages, planned, computed) starts anew with each residency; records never do.
"""

from __future__ import annotations

from perdure.api.ending import Ending
from perdure.api.event import Record
from perdure.api.sampling import ALL_LOGPROBS
from perdure.api.scores import TokenScores
from perdure.core.group import Group
from perdure.core.lifecycle import FINAL, REQUEST_MOVES, Status, moved
from perdure.core.prefix import Node
from perdure.core.stopping import StopRule

NO_SLOT = -1
NEVER = -1


class RequestState:
    """One live request, or child of one. order: (priority, arrival), lower first; arrival is also its serial number.

    ending: how it ended, once it has.
    """

    __slots__ = (
        "arrival",
        "awaits",
        "child",
        "ending",
        "epochs",
        "exact",
        "group",
        "in_flight",
        "in_flight_tokens",
        "last_position",
        "may_burst",
        "needs_host",
        "nodes",
        "num_computed",
        "num_copied",
        "num_evictions",
        "num_pauses",
        "num_planned",
        "order",
        "pages",
        "paused_at",
        "prefill_end",
        "prompt_length",
        "replay",
        "request",
        "scores",
        "slot",
        "status",
        "stops",
        "tokens",
        "tried_at",
    )

    def __init__(self, group: Group, arrival: int, stops: StopRule) -> None:
        request, params = group.request, group.request.params
        self.group = group
        self.child = len(group.children)
        group.add(self)
        self.request = request
        self.arrival = arrival
        self.order = (params.priority, arrival)
        self.stops = stops
        self.prompt_length = stops.prompt_length
        self.last_position = stops.prompt_length + stops.max_output - 1
        """Positions that will ever be computed: the last token of the budget is sampled, never computed."""
        self.needs_host = bool(params.logits_processors) or params.structured_outputs is not None
        """Whether the host has a say between its tokens: it then has one step in flight at most."""
        self.may_burst = not self.needs_host and params.logprobs != ALL_LOGPROBS
        """Whether the device can go on alone for some steps: a whole vocabulary's scores are the host's work, too."""
        self.status = Status.WAITING
        self.tokens = list(request.prompt_token_ids)
        self.scores = TokenScores(listed_ids=params.logprob_token_ids) if params.asks_scores else None
        self.ending: Ending | None = None
        self.in_flight = 0
        self.in_flight_tokens = 0
        """Positions that steps in flight compute beyond the known tokens: how many tokens may come, at most."""
        self.num_pauses = 0
        self.num_evictions = 0
        self.epochs: list[tuple[int, int]] = []
        """Where other weights took over: (first output index, epoch)."""
        self.exact = True
        """Nothing weakened the promise that its bits are those of the undisturbed run: no KV of several weights, no way
        between unequal fingerprints."""
        self.paused_at = 0
        """The latest pause, counted over all requests."""
        self.replay: int | None = None
        """Its place among those to be computed again, while in the queue (`core.queue`)."""
        self.tried_at = NEVER
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
        self.num_copied = 0
        """Positions that a step in flight copies from a sibling's page; computed once that is committed."""
        self.prefill_end = 0
        """Positions whose tokens the host gives in this residency; after them the device's own tokens follow."""

    def move(self, to: Status) -> None:
        self.status = moved(REQUEST_MOVES, self.status, to)

    @property
    def is_final(self) -> bool:
        return self.status is not Status.RUNNING and self.status in FINAL  # most are, and to look one up costs more

    @property
    def is_resident(self) -> bool:
        return self.slot != NO_SLOT

    @property
    def draws_in_flight(self) -> bool:
        """Whether a token of it is on its way."""
        return self.in_flight > 0 and self.num_planned >= self.prefill_end

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_length

    def stamp(self, epoch: int) -> None:
        """Output tokens from here on come from the weights of this epoch."""
        if not self.epochs or self.epochs[-1][1] != epoch:
            self.epochs.append((self.num_output, epoch))

    @property
    def prompt_scores(self) -> TokenScores | None:
        """Those of its group."""
        return self.group.prompt_scores

    @property
    def num_prompt_scores_missing(self) -> int:
        return self.group.num_prompt_scores_missing

    @property
    def has_begun(self) -> bool:
        """Whether anything of it is recorded: a token or a score."""
        return self.num_output > 0 or (self.prompt_scores is not None and self.prompt_scores.num_scored > 0)

    def check(self) -> None:
        """What belongs to a position is there for each, and for none twice. Raises AssertionError."""
        known = len(self.tokens)
        computed = self.num_computed + self.num_copied
        assert 0 <= computed <= self.num_planned <= max(known + self.in_flight_tokens, computed)
        assert self.prompt_length <= known and self.num_output <= self.stops.max_output
        if self.scores is not None:
            assert self.scores.num_scored == self.num_output
        if self.prompt_scores is not None:
            num_scored = self.prompt_scores.num_scored
            assert num_scored <= self.prompt_length - 1
            assert not (self.num_output and self.group.num_prompt_scores_missing)

    def record(self) -> Record:
        """The one place where a result is built from a request that has ended; everything in it is a copy."""
        group, ending, prompt_scores = self.group, self.ending, self.group.prompt_scores
        assert ending is not None
        return Record(
            request_id=self.request.request_id,
            arrival=self.arrival,
            seed=group.seed,
            prompt_token_ids=list(self.request.prompt_token_ids),
            token_ids=self.tokens[self.prompt_length :],
            finish_reason=ending.reason,
            stop=ending.stop,
            scores=None if self.scores is None else self.scores.copy(),
            prompt_scores=None if prompt_scores is None or group.num_left else prompt_scores.copy(),
            exact=self.exact,
            num_cached_tokens=group.num_cached,
            num_pauses=self.num_pauses,
            num_evictions=self.num_evictions,
            num_checkpoints=group.num_checkpoints,
            weight_epochs=list(self.epochs),
            failure=ending.failure,
            child=self.child,
        )
