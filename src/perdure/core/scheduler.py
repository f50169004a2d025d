"""`Scheduler`: the core's one face. Applies commands, plans steps, commits what came of them.

- `Requests` keeps every request and what it holds; `Planning` and `Committing` are the two halves of a step.
- Orders that change the engine's state are `Control`'s, and what they do to requests is done in `Requests`.
- A request is submitted, aborted and checkpointed here.
"""

from __future__ import annotations

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint
from perdure.api.config import CoreConfig
from perdure.api.directive import Directive, Outcome
from perdure.api.ending import Ending, Failure
from perdure.api.errors import InvalidValue, PerdureError, QueueFull, StateError, described
from perdure.api.event import Event
from perdure.api.output import Stats
from perdure.api.plan import DeviceRow, StepOutput, StepPlan
from perdure.api.request import Request, RequestId
from perdure.core import budget, checkpoint
from perdure.core.admission import admit
from perdure.core.committing import Committing
from perdure.core.control import Control
from perdure.core.group import Group
from perdure.core.lifecycle import EngineState, Status
from perdure.core.planning import Planning
from perdure.core.requests import Requests
from perdure.core.stopping import CursorFactory


class Scheduler:
    """make_cursor: text for requests with stop strings (`stopping.TextCursor`)."""

    def __init__(self, config: CoreConfig, make_cursor: CursorFactory) -> None:
        self.config = config
        self.requests = Requests(config)
        self._make_cursor = make_cursor
        self._control = Control()
        self._planning = Planning(config, self.requests, self._control)
        self._committing = Committing(self.requests, self._control)

    # Commands

    def apply(self, command: cmd.Command) -> list[Event]:
        """Carry out one command; returns what is to be told."""
        match command:
            case cmd.Submit(request, given, again):
                self._submit(request, given, again)
            case cmd.Prepared(ticket, failure):
                self._prepared(ticket, failure)
            case cmd.Abort(request_ids, tickets, everything):
                self._abort(request_ids, tickets, everything)
            case cmd.TakeCheckpoint():
                self._take_checkpoint(command)
            case cmd.ResetPrefixCache(ticket):
                self.requests.cache.clear(self.requests.residents)
                self.requests.events.append(ev.Done(ticket))
            case cmd.PinPrefix(ticket, tokens, salt):
                self.requests.events.append(self._pin(ticket, tokens, salt))
            case cmd.UnpinPrefix(ticket, pin):
                self.requests.cache.pins.release(pin)
                self.requests.events.append(ev.Done(ticket))
            case cmd.GetStats(ticket):
                self.requests.events.append(ev.Done(ticket, self.stats()))
            case cmd.Stop(ticket):
                self._abort([], [], everything=True)
                self.requests.events += self._control.stop(ticket)
            case cmd.GetReplicas():
                raise AssertionError(f"{command} is for a coordinator")
            case order:
                self._control.take(order, self.requests.counters.num_requests)
                if isinstance(order, cmd.Pause) and order.mode == "abort":
                    self._abort([], [], everything=True)
        return self._told()

    def _submit(self, request: Request, given: Checkpoint | None, again: bool) -> None:
        arrival = self.requests.counters.num_requests
        try:
            self._check_may_submit(request, again)
            if given is None:
                group = admit(request, arrival, self.config, self._make_cursor)
            else:
                group = checkpoint.readmit(
                    request, given, arrival, self.requests.fingerprint, self.config, self._make_cursor
                )
        except PerdureError as error:
            self.requests.events.append(ev.Refused(request.ticket, request.request_id, Failure.of(error)))
            return
        self.requests.add(group)
        if request.routed:
            resolved = ev.Admitted(request.ticket, group.seed, group.children[0].stops.max_output, group.logprobs_mode)
            self.requests.events.append(resolved)
        if not group.waits_for:
            self._begin(group)
            return
        for state in group.children:
            self.requests.note(state, "held", detail=group.waits_for)

    def _begin(self, group: Group) -> None:
        """Tell what it has already, and end what has nothing to do."""
        for state in group.children:
            if state.ending is not None:  # before the checkpoint was taken
                self.requests.end(state, state.ending)
            elif group.ends_at_once:
                self.requests.end(state, Ending("length"))
            elif group.request.stream:
                self._committing.report_past(state)

    def _prepared(self, ticket: int, failure: Failure | None) -> None:
        """What this submitter's requests wait for is ready, or cannot be made; those that have ended do not care."""
        held = [group for group in self.requests.live.values() if group.request.ticket == ticket and group.waits_for]
        for group in held:
            if failure is not None:
                self.requests.refuse(group, failure)
                continue
            group.waits_for = ""
            for state in group.children:
                self.requests.note(state, "released")
            self._begin(group)

    def _check_may_submit(self, request: Request, again: bool) -> None:
        if refusal := self._control.refusal(again):
            raise StateError(refusal)
        if request.request_id in self.requests.live:
            raise InvalidValue(f"request_id={request.request_id!r} is live: an id is free again when its request ended")
        limit = self.config.max_num_waiting
        if limit is not None and self.requests.num_waiting >= limit and not again:
            raise QueueFull(f"{self.requests.num_waiting} requests wait already, max_num_waiting={limit}")

    def _abort(self, request_ids: list[RequestId], tickets: list[int], everything: bool) -> None:
        if everything:
            chosen = sorted(self.requests.live.values(), key=lambda group: group.order)
        else:
            chosen = [self.requests.live[name] for name in request_ids if name in self.requests.live]
            if tickets:
                chosen += [group for group in self.requests.live.values() if group.request.ticket in tickets]
        for group in chosen:
            self._abort_group(group)

    def _abort_group(self, group: Group) -> None:
        """All of its children end with what they have."""
        for state in group.children:
            if not state.is_final:
                self.requests.end(state, state.ending or Ending("abort"))

    def _take_checkpoint(self, asked: cmd.TakeCheckpoint) -> None:
        if asked.request_id is not None:
            group = self.requests.live.get(asked.request_id)
        else:
            group = next((g for g in self.requests.live.values() if g.request.ticket == asked.request_ticket), None)
        if group is None:
            name = "the request" if asked.request_id is None else f"request_id={asked.request_id!r}"
            failure = Failure.of(InvalidValue(f"{name} is not live: it has ended, or never began"))
            self.requests.events.append(ev.Done(asked.ticket, failure=failure))
            return
        try:
            taken = checkpoint.take(group, self.requests.fingerprint)
        except Exception as error:  # want of memory, say: taking only reads, so the request is as it was
            failure = Failure(StateError.__name__, f"no checkpoint could be made: {described(error)}")
            self.requests.events.append(ev.Done(asked.ticket, failure=failure))
            return
        for state in group.children:
            if not state.is_final:
                self.requests.note(state, "checkpoint", state.num_output)
        self.requests.events.append(ev.Taken(asked.ticket, group.request.ticket, taken))
        if asked.end:
            self._abort_group(group)

    def _pin(self, ticket: int, tokens: list[int], salt: str | None) -> ev.Done:
        try:
            return ev.Done(ticket, self.requests.cache.pins.add(ticket, tokens, salt))
        except InvalidValue as error:
            return ev.Done(ticket, failure=Failure.of(error))

    # Steps

    @property
    def can_act(self) -> bool:
        """Whether `plan` could return a step now, as far as is known without trying."""
        return self._planning.can_act

    @property
    def is_stopped(self) -> bool:
        return self._control.state is EngineState.STOPPED

    def plan(self, most_steps: int = 1) -> StepPlan | None:
        """The next step, or None if there is nothing to do now (paused, drained, or all that can run is in flight).
        most_steps: of a burst, where one may be; the same with the burst's own number gives the same plan."""
        return self._planning.plan(most_steps)

    @property
    def is_closed(self) -> bool:
        """Whether everybody who waits here misses no token before the end."""
        return not self.requests.num_open

    @property
    def num_rows(self) -> int:
        """How many requests a step may have."""
        return len(self.requests.residents)

    def likely_steps(self) -> int:
        """How many steps somebody will go on for, as far as is known or likely."""
        return max((budget.likely_steps(state) for state in self.requests.residents), default=0)

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Event]:
        """Take over what a step gave; returns what is to be told."""
        self._committing.commit(plan, output)
        return self._told()

    def told(self) -> list[Event]:
        """What is to be told by now: `apply` and `commit` return it, and what `plan` has done can be had at once."""
        return self.requests.told()

    def _told(self) -> list[Event]:
        """The same, once orders have gone as far as they can."""
        if not self._control.is_settled:
            self.requests.events += self._control.advance(self.requests)
        return self.told()

    # Orders

    def directive(self) -> Directive | None:
        """What the device is asked, if an order's turn has come and no step is in flight; the same until `done`."""
        return self._control.directive(self.requests)

    def done(self, directive: Directive, outcome: Outcome) -> list[Event]:
        """Take over what came of the directive."""
        self.requests.events += self._control.done(directive, outcome, self.requests)
        return self._told()

    # Seeing

    @property
    def steps_in_flight(self) -> int:
        return self.requests.steps_in_flight

    @property
    def num_live(self) -> int:
        return self.requests.num_live

    def stats(self) -> Stats:
        counters = self.requests.counters
        paused = [state for state in self.requests.residents if state.status is Status.PAUSED]
        return Stats(
            state=self._control.state.value,
            weight_epoch=self._control.epoch,
            paused_ids=list(dict.fromkeys(state.request.request_id for state in paused)),
            num_pages=self.requests.pool.num_pages,
            num_free_pages=self.requests.pool.num_free,
            num_pinned_pages=self.requests.cache.pins.num_pages,
            num_running=len(self.requests.residents) - len(paused),
            num_waiting=self.requests.num_waiting,
            num_paused=len(paused),
            num_requests=counters.num_requests,
            num_pauses=counters.num_pauses,
            num_evictions=counters.num_evictions,
            num_steps=counters.num_steps,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_generated_tokens=counters.num_generated_tokens,
        )

    @property
    def live_tickets(self) -> list[int]:
        """Whoever submitted these waits for an end."""
        return [group.request.ticket for group in self.requests.live.values()]

    @property
    def unanswered(self) -> list[int]:
        """Control commands that will be answered later."""
        return self._control.unanswered

    def device_rows(self) -> list[DeviceRow]:
        """What the device must hold of every resident request, when no step is in flight."""
        return self.requests.device_rows()

    def check_idle(self) -> None:
        """With nobody live and nothing in flight nothing is held. Costs nothing; raises AssertionError."""
        self.requests.check_idle()

    def check(self) -> None:
        """Everything is accounted for; for debugging and tests. Raises AssertionError."""
        self.requests.check()
