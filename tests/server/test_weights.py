"""Weights as tensors over HTTP: from shared memory, or broadcast by a trainer; checked before anything changes."""

from __future__ import annotations

import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from perdure import LLM, SamplingParams
from perdure.models.tiny import make_tiny_llama
from perdure.server.tensors import SHARED_MEMORY
from tests.server.conftest import Running, running
from tests.server.started import PATH

TRAINER = Path(__file__).parent / "trainer.py"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights: its file."""
    (file,) = make_tiny_llama(tmp_path_factory.mktemp("other"), seed=1, max_position_embeddings=1024).glob(
        "*.safetensors"
    )
    return file


@pytest.fixture(scope="module")
def expected(other: Path) -> str:
    with LLM(str(other.parent)) as llm:
        [result] = llm.generate(["abc"], SamplingParams(seed=3, max_tokens=12, ignore_eos=True))
    return result.outputs[0].text


@pytest.fixture(scope="module")
def own(tiny: Path) -> Iterator[Running]:
    with running(tiny, {}, num_pages=64, check_integrity=True) as server:
        yield server


@pytest.fixture
def shared_file() -> Iterator[Path]:
    if not SHARED_MEMORY.is_dir():
        pytest.skip(f"no shared memory at {SHARED_MEMORY}")
    path = SHARED_MEMORY / f"perdure-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def told(server: Running) -> str:
    answer = server.told(PATH, prompt="abc", seed=3, max_tokens=12, ignore_eos=True)
    return str(answer["choices"][0]["text"])


def laid_out(file: Path, to: Path) -> list[dict[str, Any]]:
    """Its tensors as bytes, one after the other, each at a multiple of 64; and what lies where."""
    found, data = [], bytearray()
    for name, tensor in load_file(file).items():
        data += bytes(-len(data) % 64)
        dtype = str(tensor.dtype).removeprefix("torch.")
        found.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": len(data)})
        data += tensor.contiguous().numpy().tobytes()
    to.write_bytes(data)
    return found


def test_tensors_in_shared_memory(own: Running, other: Path, expected: str, shared_file: Path) -> None:
    before = told(own)
    assert before != expected
    tensors = laid_out(other, shared_file)
    shm = {"shm": shared_file.name, "tensors": tensors}
    size = shared_file.stat().st_size
    for wrong, words in (
        ({**shm, "file": str(shared_file)}, "one of file and shm"),
        ({"shm": "../etc"}, "shared.shm"),
        ({"shm": "nobody-made-this"}, "No such file"),
        ({"file": "/dev/zero"}, "is no file"),
        ({"file": str(shared_file)}, "no safetensors file"),
        ({**shm, "tensors": tensors[:-1]}, "tensor"),
        ({**shm, "tensors": [*tensors, tensors[0]]}, "twice"),
        ({**shm, "tensors": [*tensors[:-1], {**tensors[-1], "offset": size}]}, f"not in the {size}"),
        ({**shm, "tensors": [{**tensors[0], "offset": 1}, *tensors[1:]]}, "no place"),
        ({**shm, "tensors": [{**tensors[0], "shape": [2, 2]}, *tensors[1:]]}, tensors[0]["name"]),
        ({**shm, "tensors": [{**tensors[0], "dtype": "int8"}, *tensors[1:]]}, "dtype"),
    ):
        assert words in own.refused("/weights", shared=wrong, epoch=9)["message"]
    assert "give one of them" in own.refused("/weights", shared=shm, weights="x")["message"]
    assert told(own) == before and own.stats()["weight_epoch"] == 0
    own.http.post("/sleep?level=1").raise_for_status()
    assert own.refused("/weights", 409, shared=shm, epoch=1)["code"] == "wrong_state"
    own.told("/resume")
    assert told(own) == before
    own.told("/weights", shared=shm, epoch=1)
    assert told(own) == expected and own.stats()["weight_epoch"] == 1


def test_a_safetensors_file_in_shared_memory(
    own: Running, other: Path, expected: str, tiny: Path, shared_file: Path
) -> None:
    own.told("/weights", weights=str(tiny))
    assert told(own) != expected
    save_file(load_file(other), shared_file)
    own.told("/update_weights", shared={"file": str(shared_file)})
    assert told(own) == expected


@contextmanager
def training(file: Path, count: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, str(TRAINER), str(file), "0", str(count)]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        yield trainer, int(trainer.stdout.readline().removeprefix("listening "))
    finally:
        trainer.kill()
        trainer.wait()


def test_a_group_that_does_not_come_about_is_one_line(own: Running, capfd: pytest.CaptureFixture[str]) -> None:
    """No server there, no such name, no peer: nothing of torch's on stderr, and the next one may be asked for."""
    patience: dict[str, Any] = {"master_address": "127.0.0.1", "timeout_s": 0.2}
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    capfd.readouterr()
    for wrong, status, words in (
        ({"master_port": port}, 409, f"no group of 2 came about at 127.0.0.1:{port}: nobody listens there"),
        ({"master_port": store.port}, 409, "the others did not come in 0.2 s"),
        ({"master_port": 9, "master_address": "no such name"}, 400, "master_address='no such name' is no address"),
        ({"master_port": 9, "rank": 2}, 400, "rank=2 is out of range"),
        ({"master_port": 9, "rank": 0}, 400, "rank=0 is the trainer's"),
    ):
        assert words in own.refused("/init_weight_group", status, **{**patience, **wrong})["message"]
    said = capfd.readouterr().err.splitlines()  # what is refused may be logged, where a test before has asked for that
    assert not [line for line in said if not line.startswith("perdure: warning: ")]


def test_a_trainer_broadcasts(own: Running, other: Path, expected: str, tiny: Path, tmp_path: Path) -> None:
    own.told("/weights", weights=str(tiny))
    before = told(own)
    tensors = laid_out(other, tmp_path / "unused")
    assert "no group" in own.refused("/weights", 409, broadcast={"tensors": tensors})["message"]
    with training(other, len(tensors)) as (_, port):
        own.told("/init_weight_group", master_address="127.0.0.1", master_port=port, rank=1, world_size=2)
        again = own.refused("/init_weight_group", 409, master_address="127.0.0.1", master_port=port)
        assert "there is a group" in again["message"]
        own.told("/weights", broadcast={"tensors": tensors}, epoch=20)
        assert told(own) == expected and own.stats()["weight_epoch"] == 20
        own.told("/destroy_weight_group")
    own.told("/weights", weights=str(tiny))
    with training(other, 3) as (trainer, port):  # it dies on the way
        own.told("/init_weight_group", master_address="127.0.0.1", master_port=port)
        assert trainer.stdin is not None
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert "did not come" in own.refused("/weights", 409, broadcast={"tensors": tensors})["message"]
    assert told(own) == before
    assert "no group" in own.refused("/weights", 409, broadcast={"tensors": tensors})["message"]
