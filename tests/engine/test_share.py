"""What each of several replicas on one machine gets of it."""

import os
from pathlib import Path

import pytest

from perdure import EngineConfig, InvalidValue
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
