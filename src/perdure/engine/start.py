"""What stands behind `LLM` and `AsyncLLM`: one engine in this process, or several in processes of their own."""

from __future__ import annotations

from perdure.api.config import EngineConfig
from perdure.engine.desk import Desk
from perdure.engine.engine import Engine


def start(config: EngineConfig) -> Desk:
    """Ready to generate. Raises `ModelLoadError` and `InvalidValue`."""
    if config.launcher == "local" and config.data_parallel_size == 1 and not config.own_process:
        return Engine(config)
    from perdure.engine.launch import FleetEngine, Processes

    if config.launcher == "local":
        return FleetEngine(config, Processes(config))
    from perdure.engine.on_ray import RayFleet

    return FleetEngine(config, RayFleet(config))
