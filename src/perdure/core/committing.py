"""`Committing`: what came of a step, taken over in the order the steps were planned.

- Tokens are appended, scores recorded by position, stops tested on each new token, full pages published.
- A request ends here by stop, length or error; what a step gave beyond its end is dropped: each of a burst's rows ends
  at its first stop, and has computed what it would have had token by token.
- Results of a request that has ended are ignored, and only those.
- Work is O(rows), never O(context).
"""

from __future__ import annotations

from perdure.api import event as ev
from perdure.api.ending import Ending, Failure
from perdure.api.errors import StepFailed
from perdure.api.plan import StepOutput, StepPlan
from perdure.core.control import Control
from perdure.core.requests import Requests
from perdure.core.scores import StepScores
from perdure.core.state import RequestState


class Committing:
    """Commits to `requests`; `control` names the epoch of new tokens."""

    def __init__(self, requests: Requests, control: Control) -> None:
        self._requests = requests
        self._control = control

    def commit(self, plan: StepPlan, output: StepOutput) -> None:
        """Take over what a step gave, in the order the steps were planned."""
        requests = self._requests
        assert output.step == plan.step
        requests.steps_in_flight -= 1
        failed = dict(output.errors)
        records, prompt_records = StepScores(output.records), StepScores(output.prompt_records)
        epoch, at = self._control.epoch, 0
        columns = zip(plan.request, plan.length, plan.num_tokens, output.num_sampled, strict=True)
        for row, (arrival, length, num_given, count) in enumerate(columns):
            first, at = at, at + count
            state = requests.states[arrival]
            state.in_flight -= 1
            if not num_given:
                state.in_flight_tokens -= length
            if state.is_final:
                requests.forget_if_done(state)
                continue
            prompt_records.append(row, state.prompt_scores, state.tokens)
            failure = failed.get(row) if failed else None
            if failure is not None and not count:
                requests.end(state, Ending("error", failure=failure))
                continue
            first_new = len(state.tokens)
            if count:
                state.stamp(epoch)
                state.tokens += output.tokens[first:at]
            records.append(row, state.scores, state.tokens)
            ending = self._ending(state, count)
            if state.is_resident:
                computed = state.num_computed + state.num_copied + (length if failure is None else count)
                state.num_computed = computed if ending is None else min(computed, len(state.tokens) - 1)
                state.num_copied = 0
                if num_given:
                    requests.note(state, "chunk", length)
                requests.cache.publish(state)
                requests.prompt_may_be_there(state)
            if failure is not None and ending is None:
                ending = Ending("error", failure=failure)
            self._after_tokens(state, first_new, ending)

    def _ending(self, state: RequestState, count: int) -> Ending | None:
        """How the last `count` tokens end the request, if they do; those beyond that are dropped."""
        stops = state.stops
        if not count:
            return None
        first, end = len(state.tokens) - count, state.prompt_length + stops.max_output
        if len(state.tokens) > end:  # before a stop that lies beyond it can count
            self._cut(state, end)
        ending = Ending("length") if len(state.tokens) >= end else None
        try:
            stop = stops.first_stop(state.tokens, first)
        except StepFailed as error:
            self._cut(state, state.prompt_length + stops.num_tested)
            self._requests.counters.num_generated_tokens += len(state.tokens) - first - 1
            return Ending("error", failure=Failure.of(error))
        if stop is not None:
            self._cut(state, state.prompt_length + stop.num_tokens)
            ending = Ending("stop", stop)
        self._requests.counters.num_generated_tokens += len(state.tokens) - first
        return ending

    def _after_tokens(self, state: RequestState, first: int, ending: Ending | None) -> None:
        """End the request, or report its tokens from position `first` on."""
        requests = self._requests
        if first == state.prompt_length < len(state.tokens):
            requests.note(state, "first_token")
            self._tell_prompt_scores(state)
        if ending is not None:
            requests.end(state, ending)
        elif first == len(state.tokens):
            if state.stops.max_output == 0 and state.num_computed >= state.last_position:
                requests.end(state, Ending("length"))
        elif state.request.stream:
            self._report(state, first)

    def _tell_prompt_scores(self, state: RequestState) -> None:
        """At the first token of the request, whichever child's that is."""
        group = state.group
        if not group.request.routed or group.prompt_scores is None:
            return
        if not any(other.num_output for other in group.children if other is not state):
            self._requests.events.append(ev.PromptScored(group.request.ticket, group.prompt_scores.copy()))

    def _cut(self, state: RequestState, end: int) -> None:
        """Drop what a step gave beyond the request's end."""
        del state.tokens[end:]
        if state.scores is not None:
            state.scores = state.scores.cut(0, state.num_output)

    def _report(self, state: RequestState, first: int) -> None:
        self._tell(state, first - state.prompt_length, state.num_output, self._control.epoch)

    def report_past(self, state: RequestState) -> None:
        """What a request that goes on from a checkpoint has already: a part for each span of weights."""
        ends = [*(first for first, _ in state.epochs[1:]), state.num_output]
        for (first, epoch), end in zip(state.epochs, ends, strict=False):
            self._tell(state, first, end, epoch)

    def _tell(self, state: RequestState, first: int, end: int, epoch: int) -> None:
        """Output tokens first to end - 1, with their scores."""
        scores = None if state.scores is None else state.scores.cut(first, end)
        token_ids = state.tokens[state.prompt_length + first : state.prompt_length + end]
        self._requests.events.append(ev.Progress(state.request.ticket, first, token_ids, scores, epoch, state.child))
