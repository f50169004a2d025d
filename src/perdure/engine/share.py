"""What each of several replicas on one machine gets of it: threads and GPUs, told by its environment.

- Threads are divided, unless the environment says how many each may have.
- A replica computes on one GPU, its index's among those that this process may see. More replicas than GPUs share them
  only where the memory that each may take was given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from perdure.api.config import EngineConfig
from perdure.api.errors import InvalidValue

VISIBLE = "CUDA_VISIBLE_DEVICES"


def environments(
    config: EngineConfig, env: Mapping[str, str], num_cpus: int, num_gpus: int
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The coordinator's environment, which is `env` with the place where this package lies, and each replica's.
    num_gpus: of the machine, as far as `env` lets us see. Raises `InvalidValue`."""
    common = with_package(env)
    num_replicas = config.data_parallel_size
    replica = {"OMP_NUM_THREADS": str(max(1, num_cpus // num_replicas)), **common}
    gpus = [] if config.device == "cpu" else _visible(env, num_gpus)
    if not gpus:
        return common, [replica] * num_replicas
    _check_memory(config, gpus)
    return common, [{**replica, VISIBLE: gpus[index % len(gpus)]} for index in range(num_replicas)]


def with_package(env: Mapping[str, str]) -> dict[str, str]:
    """This environment, and the place where this package lies."""
    here = str(Path(__file__).parents[2])
    return {**env, "PYTHONPATH": os.pathsep.join([here, *filter(None, [env.get("PYTHONPATH")])])}


def _visible(env: Mapping[str, str], num_gpus: int) -> list[str]:
    """By the names that the variable gives them."""
    given = env.get(VISIBLE)
    names = [str(index) for index in range(num_gpus)] if given is None else [one.strip() for one in given.split(",")]
    return names[:num_gpus]


def _check_memory(config: EngineConfig, gpus: Sequence[str]) -> None:
    most = -(-config.data_parallel_size // len(gpus))
    is_given = config.num_pages is not None or config.kv_cache_bytes is not None
    if most > 1 and not is_given and most * config.gpu_memory_utilization > 1:
        raise InvalidValue(
            f"data_parallel_size={config.data_parallel_size}: {most} replicas would share a GPU of {len(gpus)}, each "
            f"with gpu_memory_utilization={config.gpu_memory_utilization}; give num_pages, or a part of "
            f"{1 / most:.2g} at most"
        )
