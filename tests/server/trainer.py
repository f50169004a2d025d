"""A trainer in a process of its own: it has a safetensors file's tensors, and broadcasts them when a server has joined.

python tests/server/trainer.py FILE PORT COUNT [DEVICE]   # of all, so many are sent, then it goes; PORT 0 = a free one
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore


def main() -> None:
    path, port, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    device = torch.device(sys.argv[4] if len(sys.argv) > 4 else "cpu")
    assert dist.is_available()
    patience = datetime.timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, 2, True, timeout=patience, wait_for_workers=False)
    print(f"listening {store.port}", flush=True)
    group: Any
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        group = dist.ProcessGroupNCCL(PrefixStore("perdure-weights", store), 0, 2, options)
    else:
        group = ProcessGroupGloo(PrefixStore("perdure-weights", store), 0, 2, patience)
    print("joined", flush=True)
    for tensor in list(load_file(path).values())[:count]:
        group.broadcast(tensor.to(device).view(-1).view(torch.uint8), 0).wait()
    sys.stdin.readline()


if __name__ == "__main__":
    main()
