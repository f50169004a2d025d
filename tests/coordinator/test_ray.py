"""Replicas over a Ray cluster of several nodes, each with processes of its own, all on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure import LLM, AsyncLLM, InvalidValue, PerdureError
from perdure.api.config import EngineConfig
from perdure.api.output import RequestOutput
from perdure.coordinator.router import Routing
from perdure.coordinator.service import Service
from perdure.engine.launch import LEAST_LIFE_S, FleetEngine
from perdure.engine.on_ray import RayFleet, RayReplicas
from tests.coordinator.fleet import PATIENCE_S
from tests.engine.helpers import check_equal, in_thread, prompt, settings
from tests.witness import witness

pytest.importorskip("ray", reason="Ray is not installed (pip install 'perdure[ray]')")

SRC = Path(__file__).parents[2] / "src"
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""How soon Ray notices that a node is gone."""
OBJECT_STORE_BYTES = 80 * 2**20
"""No object goes through it; Ray takes no less."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that holds no replica, and two nodes for one each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")]))
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={**node(num_cpus=0), "_system_config": QUICK})
        for _ in range(2):
            cluster.add_node(wait=False, **node(num_cpus=1))
        cluster.wait_for_nodes()
        yield cluster
        cluster.shutdown()


@pytest.fixture
def in_a_soak(soak_factor: int) -> None:
    """Each start of an actor takes seconds of a core, and of a busy one a minute."""
    if soak_factor == 1:
        pytest.skip("minutes: in a soak only")


def node(num_cpus: int) -> dict[str, Any]:
    return {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}


def on(cluster: Any) -> dict[str, Any]:
    """Settings of two replicas there."""
    placed = {"launcher": "ray", "data_parallel_size": 2, "ray_address": cluster.address}
    return {**placed, "page_size": 16, "num_pages": 128}


def wait_until(holds: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_at, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.02)


def test_without_a_cluster_it_is_said_so(tmp_path: Path) -> None:
    """First, while there is none."""
    with pytest.raises(InvalidValue, match="ray: no cluster at address='auto'"):
        RayReplicas(EngineConfig(), f"ipc://{tmp_path}/c", None, lambda error: None)


def test_replicas_on_a_cluster_of_nodes(cluster: Any, tiny: Path, tmp_path: Path, direct: LLM) -> None:
    """Placed on two nodes; a node that goes takes nobody's request along; another node, and the replica is back."""
    errors: list[PerdureError] = []
    service = Service(f"ipc://{tmp_path}/c", Routing("load_balanced"))
    members = service.coordinator.router.members
    serving = threading.Thread(target=service.run)
    serving.start()
    config = EngineConfig.of(model=str(tiny), steps_in_flight=1, **on(cluster))
    replicas = RayReplicas(config, service.endpoint, None, errors.append)
    try:
        wait_until(lambda: len(members.serving) == 2, "both replicas serve")
        nodes = replicas.nodes
        assert len(set(nodes.values())) == 2, "one a node"

        prompts = [prompt(12, seed=seed) for seed in range(6)]

        async def disturbed() -> list[RequestOutput]:
            """Requests are there until the replica is lost, which outlives its node for a moment."""
            client = await asyncio.to_thread(AsyncLLM.connect, service.endpoint)
            lost = next(one for one in cluster.list_all_nodes() if one.node_id == nodes[0])
            results: list[RequestOutput] = []
            removing = None
            until = time.monotonic() + PATIENCE_S
            while removing is None or (len(members.serving) == 2 and time.monotonic() < until):
                handles = [client.submit(ids, settings(max_tokens=200, stream_interval=1)) for ids in prompts]
                for handle in handles:
                    async for _ in handle:
                        break
                if removing is None:
                    gone = asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False)
                    removing = asyncio.create_task(gone)
                results += [await handle for handle in handles]
            await removing
            await asyncio.to_thread(client.shutdown)
            return results

        results = asyncio.run(disturbed())
        truths = direct.generate(prompts, settings(max_tokens=200))
        for at, result in enumerate(results):
            check_equal(result, truths[at % len(prompts)])
        num_moved = sum(result.metrics.num_checkpoints for result in results if result.metrics is not None)

        wait_until(lambda: len(members.serving) == 1, "one is lost")
        cluster.add_node(**node(num_cpus=1))
        wait_until(lambda: len(members.serving) == 2, "it is placed anew")
        assert replicas.nodes[0] not in nodes.values() and replicas.nodes[1] == nodes[1]
    finally:
        began = time.monotonic()
        replicas.expect_end()
        service.drain(0.0)
        serving.join(PATIENCE_S)
        replicas.end()
    stopped_ms = round(1000 * (time.monotonic() - began))
    assert not serving.is_alive() and not errors
    witness(
        "ray-nodes",
        nodes=len(set(nodes.values())),
        moved=num_moved,
        stopped_ms=stopped_ms,
    )


@pytest.mark.usefixtures("in_a_soak")
def test_an_engine_of_replicas_on_a_cluster(cluster: Any, tiny: Path, direct: LLM) -> None:
    """With a coordinator of its own, which is started again when it dies. No signal's handler is Ray's."""
    handler = signal.getsignal(signal.SIGTERM)
    with LLM(str(tiny), **on(cluster)) as llm:
        assert signal.getsignal(signal.SIGTERM) == handler
        assert isinstance(llm._engine, FleetEngine) and isinstance(llm._engine.fleet, RayFleet)
        nodes = llm._engine.fleet.nodes
        assert len(set(nodes.values())) == 2
        (coordinator,) = llm._engine.fleet.children
        prompts, params = [prompt(9, seed=seed) for seed in range(4)], settings(max_tokens=200)
        wait_until(lambda: time.monotonic() - coordinator.started_at > LEAST_LIFE_S, "it is started again at once")
        call = in_thread(lambda: llm.generate(prompts, params))
        live = llm._engine._submissions._live
        wait_until(lambda: any(one.admitted for one in list(live.values())), "a replica has one")
        coordinator.process.kill()
        results = call()
    for result, truth in zip(results, direct.generate(prompts, params), strict=True):
        check_equal(result, truth)
    assert not coordinator.is_alive
    witness("ray-engine", nodes=len(set(nodes.values())), tokens=sum(len(one.outputs[0].token_ids) for one in results))


@pytest.mark.usefixtures("in_a_soak")
def test_a_server_over_a_cluster(cluster: Any, tiny: Path, direct: LLM) -> None:
    """`perdure serve --launcher ray`: when it has ended, its node holds nothing of it."""
    options = ("--launcher", "ray", "--ray-address", cluster.address, "--port", "0", "--num-pages", "128")
    command = [sys.executable, "-m", "perdure", "serve", str(tiny), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = next((line for line in server.stderr if line.startswith("serving ")), "")
            body = {"prompt": prompt(9), "temperature": 0, "max_tokens": 8, "ignore_eos": True}
            url = f"{line.split()[-1]}/v1/completions"
            answer = httpx.post(url, json={**body, "return_token_ids": True}, timeout=PATIENCE_S).json()
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_S) == 0
        finally:
            server.kill()
    (truth,) = direct.generate([prompt(9)], settings(max_tokens=8))
    assert answer["choices"][0]["token_ids"] == truth.outputs[0].token_ids
    witness("ray-served", tokens=len(truth.outputs[0].token_ids))


@pytest.mark.usefixtures("in_a_soak")
def test_what_keeps_replicas_from_beginning_is_told(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(PerdureError, match=str(tmp_path / "nothing")):
        LLM(str(tmp_path / "nothing"), **on(cluster))
