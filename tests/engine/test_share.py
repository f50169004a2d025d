"""What each of several replicas on one machine gets of it."""

import os
import subprocess
from pathlib import Path

import pytest

from perdure import EngineConfig, EngineDead, InvalidValue
from perdure.engine.share import environments

SRC = str(Path(__file__).parents[2] / "src")


def shares(env: dict[str, str], num_gpus: int, num_replicas: int = 2, **settings):
    config = EngineConfig.of(data_parallel_size=num_replicas, **settings)
    return environments(config, env, num_cpus=8, num_gpus=num_gpus)


def test_threads_are_divided_unless_the_environment_says_how_many():
    common, replicas = shares({"PATH": "p", "PYTHONPATH": "mine"}, 0, num_replicas=3)
    assert common == {"PATH": "p", "PYTHONPATH": os.pathsep.join([SRC, "mine"])}
    assert replicas == [{**common, "OMP_NUM_THREADS": "2"}] * 3
    assert [one["OMP_NUM_THREADS"] for one in shares({"OMP_NUM_THREADS": "7"}, 0)[1]] == ["7", "7"]
    assert [one["OMP_NUM_THREADS"] for one in shares({}, 0, num_replicas=16)[1]] == ["1"] * 16


@pytest.mark.parametrize(
    ("visible", "num_gpus", "num_replicas", "settings", "expected"),
    [
        (None, 4, 2, {}, ["0", "1"]),
        ("2,3", 2, 2, {"device": "cuda"}, ["2", "3"]),
        ("GPU-aa, GPU-bb", 2, 2, {}, ["GPU-aa", "GPU-bb"]),
        (None, 2, 4, {"num_pages": 64}, ["0", "1", "0", "1"]),
        (None, 2, 4, {"kv_cache_bytes": 2**30}, ["0", "1", "0", "1"]),
        (None, 1, 2, {"gpu_memory_utilization": 0.5}, ["0", "0"]),
        (None, 4, 2, {"device": "cpu"}, [None, None]),
        ("", 0, 2, {}, ["", ""]),
        (None, 0, 2, {}, [None, None]),
    ],
)
def test_gpus_are_divided_by_index(visible, num_gpus, num_replicas, settings, expected):
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    common, replicas = shares(env, num_gpus, num_replicas, **settings)
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in replicas] == expected
    assert common.get("CUDA_VISIBLE_DEVICES") == visible, "the coordinator's is as it was"


def test_gpus_that_would_be_promised_twice_are_refused():
    with pytest.raises(InvalidValue, match=r"data_parallel_size=3: 2 replicas would share a GPU of 2, each with .*0.9"):
        shares({}, 2, num_replicas=3)


def test_each_child_gets_its_own(monkeypatch, tmp_path):
    """By the environment of the processes that are started."""
    from perdure.engine import launch

    started = []

    class Child:
        process = subprocess.Popen(["true"], stdin=subprocess.PIPE)

        def __init__(self, module, settings, env):
            started.append((module.rpartition(".")[2], env.get("CUDA_VISIBLE_DEVICES"), env.get("OMP_NUM_THREADS")))

        def ready(self):
            raise EngineDead("that is enough")

        def end(self, timeout_s):
            pass

    monkeypatch.setattr(launch, "Child", Child)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: range(6))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(EngineDead, match="enough"):
        launch.Processes(EngineConfig.of(model=str(tmp_path), data_parallel_size=2))
    assert started == [("service", None, None), ("replica", "0", "3"), ("replica", "1", "3")]
