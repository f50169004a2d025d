"""A trainer on one GPU broadcasts to a server's group on another, by NCCL. Needs two GPUs, since NCCL does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from perdure import StateError
from perdure.models.tiny import make_tiny_llama
from perdure.server.protocol.control import Broadcast, GroupRequest, TensorShape
from perdure.server.weight_group import WeightGroup

TRAINER = Path(__file__).parents[1] / "server" / "trainer.py"

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here")


@pytest.mark.parametrize("num_sent", ["all", "some"])
def test_tensors_come_from_another_gpu_and_one_that_does_not_come_is_an_error(num_sent: str, tmp_path: Path) -> None:
    (file,) = make_tiny_llama(tmp_path, seed=1).glob("*.safetensors")
    tensors = {name: one.bfloat16() if at % 2 else one for at, (name, one) in enumerate(load_file(file).items())}
    save_file(tensors, file)
    count = len(tensors) if num_sent == "all" else 3
    command = [sys.executable, str(TRAINER), str(file), "0", str(count), "cuda:1"]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    asked = Broadcast(
        tensors=[
            TensorShape(name=name, dtype=str(one.dtype).removeprefix("torch."), shape=list(one.shape))  # type: ignore[arg-type]
            for name, one in load_file(file).items()
        ]
    )

    async def received() -> dict[str, torch.Tensor]:
        assert trainer.stdout is not None
        port = int(trainer.stdout.readline().removeprefix("listening "))
        asking = GroupRequest(master_address="127.0.0.1", master_port=port, backend="nccl", timeout_s=20)
        return await (await WeightGroup.join(asking)).receive(asked)

    try:
        if num_sent == "some":
            with pytest.raises(StateError, match="did not come"):
                asyncio.run(received())
            return
        found = asyncio.run(received())
    finally:
        trainer.kill()
        trainer.wait()
    assert all(torch.equal(found[name], one) for name, one in load_file(file).items()) and len(found) == count
    assert {one.device.type for one in found.values()} == {"cpu"}
