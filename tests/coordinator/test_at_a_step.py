"""Cases through the coordinator whose moment is a step: T05, T06, and the reference's cross row of a partial recompute.

Sockets, coordinator, client and replica are real; the replica is a thread of this process, and a brake stops its engine
between two steps, so that what a client does meanwhile has an exact place among them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure import LLM, AsyncLLM
from perdure.api import command as cmd
from perdure.api.config import EngineConfig
from perdure.coordinator.router import Routing
from perdure.coordinator.service import Service
from perdure.engine.replica import Replica
from tests.coordinator.fleet import PATIENCE_S
from tests.engine.helpers import Brake, check_equal, pressure, prompt, settings, until
from tests.witness import witness

HELD = Routing("load_balanced", silence_s=PATIENCE_S, stall_s=PATIENCE_S)
"""A replica before the brake completes no step, and is not lost for that."""


class Braked:
    """settings: of the engine."""

    def __init__(self, endpoint: str, model: Path, **settings: Any) -> None:
        self.service = Service(endpoint, HELD)
        config = {"model": str(model), "page_size": 16, "num_pages": 128, "check_integrity": True, **settings}
        self.replica = Replica(EngineConfig.of(**config), endpoint)
        self.brake = Brake(self.replica.engine)
        self._threads = [threading.Thread(target=run) for run in (self.service.run, self.replica.run)]
        for thread in self._threads:
            thread.start()
        self.client = AsyncLLM.connect(endpoint, patience_s=PATIENCE_S)

    def came(self, kind: type[cmd.Command]) -> None:
        """Wait until the engine has this command, and has not taken it up."""
        inbox = self.replica.engine._inbox
        until(lambda: any(isinstance(command, kind) for command in inbox.waiting), PATIENCE_S)

    def stop(self) -> None:
        self.brake.release()
        self.client._engine.ask(cmd.Stop).result(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self.service.coordinator.check_idle()
        self.client.shutdown()


MakeBraked = Callable[..., Braked]


@pytest.fixture
def braked(tiny: Path, tmp_path: Path) -> Iterator[MakeBraked]:
    made: list[Braked] = []

    def make(**settings: Any) -> Braked:
        made.append(Braked(f"ipc://{tmp_path}/c", tiny, **settings))
        return made[-1]

    yield make
    for one in made:
        one.stop()


DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@DEPTHS
def test_T05_an_aborted_preempted_request_keeps_its_six_tokens(depth: int, braked: MakeBraked, direct: LLM) -> None:
    """B lacks a page when it has 6 tokens, is evicted, and aborted while it waits for A's pages."""
    fleet = braked(num_pages=4, paused_pages=0, steps_in_flight=depth)
    params = settings(max_tokens=15)

    async def run() -> None:
        client = fleet.client
        await client.pause()
        a, b = client.submit(prompt(33), params, request_id="A"), client.submit(prompt(11), params, request_id="B")
        fleet.brake.hold(after=11)
        await client.resume()
        await asyncio.to_thread(fleet.brake.wait_until_held)
        b.abort()
        await asyncio.to_thread(fleet.came, cmd.Abort)
        fleet.brake.release()
        first, second = await a, await b
        assert second.outputs[0].finish_reason == "abort"
        check_equal(second, direct.generate([prompt(11)], params)[0], num_tokens=6)
        check_equal(first, direct.generate([prompt(33)], params)[0])
        witness("T05-routed", num_evictions=pressure(second)[0])

    asyncio.run(run())


@DEPTHS
def test_T06_an_abort_in_the_last_step(depth: int, braked: MakeBraked, direct: LLM) -> None:
    """The abort comes while the step runs that would end it by length: one end, by the abort."""
    fleet = braked(steps_in_flight=depth)
    params = settings(max_tokens=6)

    async def run() -> None:
        fleet.brake.hold(after=5)
        handle = fleet.client.submit(prompt(9), params)
        await asyncio.to_thread(fleet.brake.wait_until_held)
        handle.abort()
        handle.abort()
        await asyncio.to_thread(fleet.came, cmd.Abort)
        fleet.brake.release()
        parts = [part async for part in handle]
        assert sum(part.finished for part in parts) == 1
        result = await handle
        assert result.outputs[0].finish_reason == "abort"
        check_equal(result, direct.generate([prompt(9)], params)[0], num_tokens=5)
        witness("T06-routed", tokens=len(result.outputs[0].token_ids))

    asyncio.run(run())


@DEPTHS
def test_a_chunked_prompt_that_is_dropped_in_part_is_computed_again(
    depth: int, braked: MakeBraked, direct: LLM
) -> None:
    """The reference's cross row: suspended with recompute in mid-prefill; no prompt score twice, none missing."""
    fleet = braked(max_num_batched_tokens=3, steps_in_flight=depth)
    params = settings(prompt_logprobs=2)

    async def run() -> None:
        client = fleet.client
        fleet.brake.hold(after=1)
        handle = client.submit(prompt(30), params)
        await asyncio.to_thread(fleet.brake.wait_until_held)
        suspended = asyncio.create_task(client.suspend("recompute"))
        await asyncio.to_thread(fleet.came, cmd.Suspend)
        fleet.brake.release()
        await suspended
        (group,) = fleet.replica.engine._loop.scheduler.requests.live.values()
        state = group.children[0]
        assert state.prompt_scores is not None
        num_scored, num_output = state.prompt_scores.num_scored, state.num_output
        assert num_scored == 3 * (1 + depth) and not num_output
        await client.resume()
        result = await handle
        check_equal(result, direct.generate([prompt(30)], params)[0])
        assert result.prompt_logprobs is not None and result.metrics is not None
        num_computed = sum(event.num_tokens for event in result.metrics.events if event.kind == "chunk")
        assert num_computed == 30 + num_scored, "what was dropped was computed again, and once"
        witness(
            "partial-recompute-routed",
            num_scored_before=num_scored,
            num_scored=result.prompt_logprobs.num_scored,
            num_computed=num_computed,
        )

    asyncio.run(run())
