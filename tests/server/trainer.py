"""A trainer in a process of its own: it has a safetensors file's tensors, and broadcasts them when a line comes.

python tests/server/trainer.py FILE PORT COUNT   # of all, so many are sent, then it goes
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore


def main() -> None:
    path, port, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    assert dist.is_available()
    patience = datetime.timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, 2, True, timeout=patience, wait_for_workers=False)
    print("listening", flush=True)
    group = ProcessGroupGloo(PrefixStore("perdure-weights", store), 0, 2, patience)
    print("joined", flush=True)
    for tensor in list(load_file(path).values())[:count]:
        group.broadcast(tensor, 0).wait()
    sys.stdin.readline()


if __name__ == "__main__":
    main()
