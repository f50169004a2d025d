"""Replicas over a Ray cluster of several nodes, each with processes of its own, all on this machine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure import LLM, AsyncLLM, InvalidValue, PerdureError
from perdure.api.config import EngineConfig
from perdure.api.output import RequestOutput
from perdure.coordinator.router import Routing
from perdure.coordinator.service import Service
from perdure.engine.on_ray import Place, RayReplicas
from tests.coordinator.fleet import PATIENCE_S
from tests.engine.helpers import check_equal, prompt, settings
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


def node(num_cpus: int) -> dict[str, Any]:
    return {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}


def wait_until(holds: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_at, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.02)


def test_without_a_cluster_it_is_said_so(tmp_path: Path) -> None:
    """First, while there is none."""
    with pytest.raises(InvalidValue, match="ray: no cluster at address='auto'"):
        RayReplicas(EngineConfig(), f"ipc://{tmp_path}/c", None, 1, Place(), lambda error: None)


def test_replicas_on_a_cluster_of_nodes(cluster: Any, tiny: Path, tmp_path: Path, direct: LLM) -> None:
    """Placed on two nodes; a node that goes takes nobody's request along; another node, and the replica is back."""
    errors: list[PerdureError] = []
    service = Service(f"ipc://{tmp_path}/c", Routing("load_balanced"))
    members = service.coordinator.router.members
    serving = threading.Thread(target=service.run)
    serving.start()
    config = EngineConfig.of(model=str(tiny), page_size=16, num_pages=128, steps_in_flight=1)
    replicas = RayReplicas(config, service.endpoint, None, 2, Place(address=cluster.address), errors.append)
    try:
        wait_until(lambda: len(members.serving) == 2, "both replicas serve")
        nodes = replicas.nodes
        assert len(set(nodes.values())) == 2, "one a node"

        async def disturbed() -> list[RequestOutput]:
            client = await asyncio.to_thread(AsyncLLM.connect, service.endpoint)
            params = settings(max_tokens=200, stream_interval=1)
            handles = [client.submit(prompt(12, seed=seed), params) for seed in range(6)]
            for handle in handles:
                async for _ in handle:
                    break
            lost = next(one for one in cluster.list_all_nodes() if one.node_id == nodes[0])
            await asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False)
            results = [await handle for handle in handles]
            await asyncio.to_thread(client.shutdown)
            return results

        results = asyncio.run(disturbed())
        for seed, result in enumerate(results):
            check_equal(result, direct.generate([prompt(12, seed=seed)], settings(max_tokens=200))[0])
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


def test_what_keeps_replicas_from_beginning_is_told(cluster: Any, tmp_path: Path) -> None:
    errors: list[PerdureError] = []
    config = EngineConfig.of(model=str(tmp_path / "nothing"))
    endpoint = f"ipc://{tmp_path}/c"
    replicas = RayReplicas(config, endpoint, None, 1, Place(address=cluster.address), errors.append)
    try:
        wait_until(lambda: bool(errors), "it is told")
    finally:
        replicas.end()
    assert str(tmp_path / "nothing") in str(errors[0])
