"""Orders, one after another: what each is answered, refused or delayed by, in every state; without a device."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.api import command as cmd
from perdure.api.directive import Clear, LoadWeights, Outcome, Sleep, Wake
from perdure.api.errors import DeviceError
from perdure.api.event import Done, Event, Failure
from perdure.core.control import Control
from perdure.core.lifecycle import EngineState


class Requests:
    """Stands for the scheduler: numbers that a test sets, and what was done to it."""

    def __init__(self) -> None:
        self.steps_in_flight = 0
        self.num_live = 0
        self.num_pins = 0
        self.weights = 0
        self.oldest = 0
        self.done: list[str] = []

    def any_before(self, arrival: int) -> bool:
        return self.num_live > 0 and self.oldest < arrival

    def kept_pages(self) -> list[int]:
        return [2, 5]

    def drop_kv(self) -> None:
        self.done.append("drop")

    def take_weights(self, epoch: int, digest: str, cache: str, in_flight: str) -> None:
        self.weights = epoch
        self.done.append(f"weights {epoch} {cache} {in_flight}")

    def begin_anew(self) -> None:
        self.done.append("anew")


class Desk:
    """A control and its requests. give: an order; perform: the device does its part of the first."""

    def __init__(self) -> None:
        self.control, self.requests = Control(), Requests()

    @property
    def state(self) -> EngineState:
        return self.control.state

    def give(self, *orders: cmd.Order) -> list[Event]:
        for order in orders:
            self.control.take(order, next_arrival=5)
        return self.control.advance(self.requests)

    def directive(self) -> Any:
        return self.control.directive(self.requests)

    def perform(self, outcome: Outcome | None = None) -> list[Event]:
        told = self.control.done(self.directive(), outcome or Outcome(), self.requests)
        return told + self.control.advance(self.requests)


FAILED = Outcome(Failure.of(DeviceError("planted")), changed=True)
UNCHANGED = Outcome(Failure.of(DeviceError("planted")))


def refused(events: list[Event]) -> str:
    (event,) = events
    assert isinstance(event, Done) and event.failure is not None and event.failure.kind == "StateError"
    return event.failure.message


@pytest.mark.parametrize("kv", ["persist", "offload", "recompute"])
def test_a_suspension_waits_for_the_drain_and_a_resume_brings_all_back(kv: cmd.KVMode) -> None:
    desk = Desk()
    desk.requests.steps_in_flight = 2
    assert desk.give(cmd.Suspend(1, kv, "offload")) == []
    assert not desk.control.may_plan and desk.directive() is None and "suspended" in str(desk.control.refusal())
    desk.requests.steps_in_flight = 0
    assert desk.directive() == Sleep(kv, "offload", [2, 5] if kv == "offload" else [])
    assert desk.perform() == [Done(1)] and desk.state is EngineState.SUSPENDED
    assert desk.requests.done == ["drop"] * (kv == "recompute")
    assert desk.give(cmd.Suspend(2, "recompute", "drop"), cmd.Pause(3)) == [Done(2), Done(3)]
    assert desk.give(cmd.Resume(4, ["weights"])) == []
    assert desk.directive() == Wake(False, True, [])
    assert desk.perform() == [Done(4)] and desk.state is EngineState.SUSPENDED
    assert desk.give(cmd.Resume(5)) == [] and desk.control.refusal() is None
    assert desk.directive() == Wake(True, False, [2, 5] if kv == "offload" else [])
    assert desk.perform() == [Done(5)] and desk.state is EngineState.RUNNING and desk.control.may_plan


def test_orders_wait_for_one_another() -> None:
    """Suspend, resume, pause, reset, given at once: carried out in that order, whatever is drained when."""
    desk = Desk()
    desk.requests.steps_in_flight = 1
    orders = (cmd.Suspend(1), cmd.Resume(2), cmd.Pause(3), cmd.Reset(4), cmd.Resume(5))
    assert desk.give(*orders) == [] and desk.control.refusal() is None
    desk.requests.steps_in_flight = 0
    assert desk.perform() == [Done(1)]
    assert desk.perform() == [Done(2), Done(3)] and desk.state is EngineState.PAUSED
    assert desk.directive() == Clear()
    assert desk.perform() == [Done(4), Done(5)] and desk.requests.done == ["anew"]
    assert desk.state is EngineState.RUNNING


def test_a_suspension_behind_a_pause_that_waits() -> None:
    """Requests of the pause end first, planning goes on for them, and a later resume cancels neither."""
    desk = Desk()
    desk.requests.num_live = 1
    assert desk.give(cmd.Pause(1, "wait"), cmd.Suspend(2), cmd.Resume(3)) == []
    assert desk.control.may_plan and not desk.control.may_admit(5) and desk.directive() is None
    desk.requests.num_live = 0
    assert desk.give() == [Done(1)] and not desk.control.may_plan
    assert desk.perform() == [Done(2)] and desk.perform() == [Done(3)]
    assert desk.state is EngineState.RUNNING


def test_what_is_illegal_is_refused_in_its_turn() -> None:
    desk = Desk()
    desk.requests.num_live = 1
    assert "1 are outstanding" in refused(desk.give(cmd.Reset(1)))
    desk.give(cmd.Suspend(2, "persist", "drop"))
    desk.perform()
    assert "while the engine is suspended" in refused(desk.give(cmd.Reset(3)))
    assert "when they are awake" in refused(desk.give(cmd.UpdateWeights(4)))
    for tags in (None, ["kv"], ["weights", "kv"]):
        assert "not whole" in refused(desk.give(cmd.Resume(5, tags)))
    desk.give(cmd.Resume(6, ["weights"]))
    assert desk.perform() == [Done(6)]
    assert "update_weights() first" in refused(desk.give(cmd.Resume(7)))
    assert "update_weights() before" in str(desk.control.refusal())
    assert desk.give(cmd.UpdateWeights(8, 3, cache="keep", in_flight="keep")) == []
    assert desk.directive() == LoadWeights(8)
    assert desk.perform() == [Done(8)] and desk.requests.done == ["weights 3 keep keep"]
    assert desk.state is EngineState.SUSPENDED and desk.control.epoch == 3
    assert "by epoch" in refused(desk.give(cmd.UpdateWeights(9, 3, cache="salt")))
    desk.give(cmd.Resume(10))
    assert desk.perform() == [Done(10)] and desk.state is EngineState.RUNNING
    assert desk.give(cmd.Resume(11, ["kv"])) == [Done(11)]


def test_an_epoch_alone_needs_a_drain_and_no_device() -> None:
    desk = Desk()
    desk.requests.steps_in_flight = 1
    assert desk.give(cmd.UpdateWeights(1, 7, has_weights=False)) == [] and not desk.control.may_plan
    desk.requests.steps_in_flight = 0
    assert desk.give() == [Done(1)] and desk.control.epoch == 7 and desk.control.may_plan
    assert desk.give(cmd.Pause(2), cmd.UpdateWeights(3, 8, has_weights=False)) == [Done(2), Done(3)]
    assert (desk.state, desk.control.epoch, desk.requests.weights) == (EngineState.PAUSED, 8, 0)


@pytest.mark.parametrize("before", [EngineState.RUNNING, EngineState.PAUSED])
def test_a_suspension_that_fails_leaves_the_state_before_it(before: EngineState) -> None:
    desk = Desk()
    desk.give(*[cmd.Pause(1)] * (before is EngineState.PAUSED))
    desk.give(cmd.Suspend(2, "offload"))
    assert desk.perform(UNCHANGED) == [Done(2, failure=UNCHANGED.failure)] and desk.state is before
    assert desk.control.refusal() is None


@pytest.mark.parametrize("before", [EngineState.RUNNING, EngineState.PAUSED])
def test_an_update_that_fails_when_it_had_begun_suspends_until_one_succeeds(before: EngineState) -> None:
    desk = Desk()
    desk.give(*[cmd.Pause(1)] * (before is EngineState.PAUSED))
    desk.give(cmd.UpdateWeights(2))
    assert desk.perform(UNCHANGED) == [Done(2, failure=UNCHANGED.failure)] and desk.state is before
    desk.give(cmd.UpdateWeights(3))
    assert desk.perform(FAILED) == [Done(3, failure=FAILED.failure)]
    assert desk.state is EngineState.SUSPENDED and "update_weights() before" in str(desk.control.refusal())
    assert "not whole" in refused(desk.give(cmd.Resume(4)))
    assert desk.give(cmd.Suspend(5, "recompute")) == [Done(5)]
    assert desk.give(cmd.UpdateWeights(6, 9, has_weights=False)) == [Done(6)]
    assert desk.state is EngineState.SUSPENDED and desk.control.epoch == 9
    desk.give(cmd.UpdateWeights(7))
    assert desk.perform(FAILED) == [Done(7, failure=FAILED.failure)] and desk.state is EngineState.SUSPENDED
    desk.give(cmd.UpdateWeights(8))
    assert desk.perform() == [Done(8)] and desk.state is before
    assert desk.requests.done == ["weights 10 invalidate recompute"]


def test_a_wake_that_fails_can_be_tried_again() -> None:
    desk = Desk()
    desk.give(cmd.Suspend(1, "offload", "offload"))
    desk.perform()
    desk.give(cmd.Resume(2))
    assert desk.perform(UNCHANGED) == [Done(2, failure=UNCHANGED.failure)] and desk.state is EngineState.SUSPENDED
    desk.give(cmd.Resume(3))
    assert desk.directive() == Wake(True, True, [2, 5])
    assert desk.perform() == [Done(3)] and desk.state is EngineState.RUNNING


def test_a_stop_answers_every_order() -> None:
    desk = Desk()
    desk.requests.num_live, desk.requests.steps_in_flight = 1, 1
    assert desk.give(cmd.Pause(1, "wait"), cmd.Suspend(2), cmd.Resume(3)) == []
    told = desk.control.stop(4)
    assert [event.ticket for event in told if isinstance(event, Done) and event.failure] == [2, 3] and len(told) == 2
    desk.requests.steps_in_flight = 0
    assert desk.give() == [Done(1), Done(4)] and desk.state is EngineState.STOPPED
    assert "stopped" in refused(desk.give(cmd.Suspend(5))) and "stopped" in str(desk.control.refusal())
    assert desk.give(cmd.Resume(6)) == [Done(6)] and desk.state is EngineState.STOPPED


def test_a_request_behind_orders_that_bring_all_back_is_taken() -> None:
    """Dropped weights, an update and the way back lie in the queue: what is submitted behind them finds a whole
    engine. Without the update the way back will be refused, and so is the request."""
    desk = Desk()
    desk.give(cmd.Suspend(1, "offload", "drop"), cmd.Resume(2, ["weights"]), cmd.Resume(3))
    assert desk.control.refusal() is not None
    desk = Desk()
    desk.give(cmd.Suspend(1, "offload", "drop"), cmd.Resume(2, ["weights"]))
    desk.give(cmd.UpdateWeights(3, epoch=1))
    assert desk.control.refusal() is not None, "the KV sleeps on"
    desk.give(cmd.Resume(4))
    assert desk.control.refusal() is None
    told = [event for _ in range(4) for event in desk.perform()]
    assert told == [Done(1), Done(2), Done(3), Done(4)] and desk.state is EngineState.RUNNING
