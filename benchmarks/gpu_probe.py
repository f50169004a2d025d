"""What the CUDA runner leans on, asked of the card itself.

    python benchmarks/gpu_probe.py [--json FILE]

1. What does a CUDA graph's replay cost, and what does each small kernel in it?
2. Does memory of CUDA's virtual-memory calls come back at the same address after it was given to the driver, and does a
   graph captured before still replay?

Whether tiles of products agree bitwise was asked here first (docs/adr/0006); tests/cuda/test_linear.py holds it now,
for the kernels that are used.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import triton

from perdure.runner.cuda.arena import CudaArena


def graphs() -> dict[str, float]:
    """Microseconds on the clock of a replay, by number of small kernels in it."""
    found = {}
    x = torch.zeros(64, 1024, device="cuda")
    for count in (1, 10, 100, 400):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                x.add_(1.0)
        for name, wait_each in (("launched", False), ("waited", True)):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(200):
                graph.replay()
                if wait_each:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            found[f"{count} kernels, {name}"] = round(1e6 * (time.perf_counter() - begin) / 200, 2)
        begin = time.perf_counter()
        for _ in range(200):
            graph.replay()
        found[f"{count} kernels, host only"] = round(1e6 * (time.perf_counter() - begin) / 200, 2)
        torch.cuda.synchronize()
    return found


def arenas(num_bytes: int = 8 << 30) -> dict[str, Any]:
    torch.zeros(1, device="cuda")
    arena = CudaArena(num_bytes)
    tensor = arena.tensor(torch.float32)
    tensor.normal_()
    graph = torch.cuda.CUDAGraph()
    out = torch.empty(1 << 20, device="cuda")
    with torch.cuda.graph(graph):
        torch.mul(tensor[: 1 << 20], 2.0, out=out)
    graph.replay()
    torch.cuda.synchronize()
    expected, address = out.clone(), tensor.data_ptr()
    kept = torch.empty(tensor.numel(), pin_memory=True)
    times = {}

    def timed(name: str, action: Any) -> None:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times[name] = round(time.perf_counter() - begin, 4)

    free_before = torch.cuda.mem_get_info()[0]
    timed("copy_out", lambda: kept.copy_(tensor))
    timed("release", arena.release)
    free_released = torch.cuda.mem_get_info()[0]
    timed("commit", arena.commit)
    timed("copy_in", lambda: tensor.copy_(kept))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return {
        "bytes": arena.num_bytes,
        "returned_to_driver": free_released - free_before,
        "same_address": arena.tensor(torch.float32).data_ptr() == address,
        "graph_replays_the_same": bool(torch.equal(out, expected)),
        "seconds": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "workload": "benchmarks/gpu_probe.py",
    }
    for name, probe in (("graph_replay_microseconds", graphs), ("arena", arenas)):
        try:
            report[name] = probe()
        except Exception as error:
            report[name] = f"{type(error).__name__}: {error}"
    text = json.dumps(report, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
