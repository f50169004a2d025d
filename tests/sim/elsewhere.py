"""Another engine of the same model, at another depth and with other pages and chunks, for checkpoints to go on in."""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec.structs import replace

from perdure.api import event as ev
from perdure.api.config import CoreConfig
from perdure.api.ending import Failure
from perdure.api.plan import StepPlan
from perdure.core.scheduler import Scheduler
from perdure.core.stopping import CursorFactory
from perdure.engine.loop import Inbox, Loop
from perdure.runner.fake import FakeDevice


class Elsewhere:
    """Its pool holds the longest request of the home engine, and little more."""

    def __init__(
        self,
        home: CoreConfig,
        rng: random.Random,
        make_cursor: CursorFactory,
        publish: Callable[[list[ev.Event], float], None],
        fail: Callable[[StepPlan], dict[int, Failure]],
    ) -> None:
        page_size = rng.choice((1, 2, 4, 8))
        num_pages = -(-home.max_num_tokens // page_size) + rng.randrange(4)
        self.config = replace(
            home,
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=rng.randint(1, 4),
            max_num_batched_tokens=rng.choice((1, 3, 7, 64)),
            paused_pages=rng.randint(0, num_pages),
            seed=rng.randrange(5),
            logprobs_mode="processed",  # the engine's, which a checkpoint does not follow
        )
        self.scheduler = Scheduler(self.config, make_cursor)
        device = FakeDevice(num_pages, page_size, self.config.max_num_seqs, home.vocab_size, fail)
        self.inbox = Inbox()
        self.loop = Loop(self.scheduler, device, self.inbox, publish, steps_in_flight=rng.randint(1, 4), check=True)
