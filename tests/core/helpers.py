"""Small makers for core tests."""

from __future__ import annotations

from typing import Any

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.config import CoreConfig
from perdure.api.plan import StepPlan
from perdure.api.request import Request, RequestId
from perdure.api.sampling import SamplingParams
from perdure.core.scheduler import Scheduler
from perdure.core.stopping import TextCursor
from perdure.runner.fake import FakeDevice


def config(**changes: Any) -> CoreConfig:
    settings: dict[str, Any] = {
        "num_pages": 64,
        "page_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "vocab_size": 32,
    }
    return CoreConfig(**{**settings, **changes})


def request(name: RequestId, prompt: list[int], **params: Any) -> Request:
    """Its ticket is the hash of its name, so that tests can name it."""
    return Request(name, ticket_of(name), prompt, SamplingParams(**params))


def ticket_of(name: RequestId) -> int:
    return hash(("ticket", name)) & 0xFFFF


def no_text(request: Request) -> TextCursor:
    raise AssertionError("no stop strings here")


class Bench:
    """A scheduler and a fake device, stepped by hand."""

    def __init__(self, **changes: Any) -> None:
        self.config = config(**changes)
        self.scheduler = Scheduler(self.config, no_text)
        self.device = FakeDevice(
            self.config.num_pages, self.config.page_size, self.config.max_num_seqs, self.config.vocab_size
        )
        self.in_flight: list[tuple[StepPlan, Any]] = []
        self.events: list[ev.Event] = []

    def submit(self, name: RequestId, prompt: list[int], **params: Any) -> None:
        self.apply(cmd.Submit(request(name, prompt, **params)))

    def apply(self, command: cmd.Command) -> list[ev.Event]:
        told = self.scheduler.apply(command)
        self.events += told
        return told

    def launch(self, most_steps: int = 1) -> StepPlan | None:
        plan = self.scheduler.plan(most_steps)
        self.events += self.scheduler.told()
        if plan is not None:
            self.in_flight.append((plan, self.device.launch(plan)))
        return plan

    def commit(self) -> list[ev.Event]:
        plan, ticket = self.in_flight.pop(0)
        told = self.scheduler.commit(plan, ticket.wait())
        self.scheduler.check()
        self.events += told
        return told

    def step(self, most_steps: int = 1) -> list[ev.Event]:
        self.launch(most_steps)
        return self.commit()

    def run(self, most_steps: int = 1) -> None:
        while self.launch(most_steps) is not None:
            self.commit()

    def ended(self, name: RequestId) -> ev.Record:
        found = [e.record for e in self.events if isinstance(e, ev.Ended) and e.record.request_id == name]
        assert len(found) == 1, found
        return found[0]

    def refused(self, name: RequestId) -> ev.Failure:
        found = [e.failure for e in self.events if isinstance(e, ev.Refused) and e.request_id == name]
        assert len(found) == 1, found
        return found[0]
