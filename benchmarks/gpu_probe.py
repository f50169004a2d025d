"""What the design of the CUDA runner leans on, asked of the card itself.

    python benchmarks/gpu_probe.py [--json FILE]

1. Do Triton products with tiles of 16 rows (mma) and of 64 and 128 rows (wgmma on Hopper) agree bitwise, for one block
   of K and no split of it?
2. What does a CUDA graph's replay cost, and what does each small kernel in it?
3. Does memory of CUDA's virtual-memory calls come back at the same address after it was given to the driver, and does a
   graph captured before still replay?
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _product(
    x, w, y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # x [M, K], w [N, K], y [M, N] fp32
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(x + rows[:, None] * K + k + ks[None, :], mask=rows[:, None] < M, other=0.0)
        b = tl.load(w + cols[None, :] * K + k + ks[:, None])
        total = tl.dot(a, b, total)
    tl.store(y + rows[:, None] * N + cols[None, :], total, mask=rows[:, None] < M)


def product(x: torch.Tensor, w: torch.Tensor, block_m: int, block_k: int, warps: int) -> tuple[torch.Tensor, str]:
    """The product and the family of instructions it was compiled to."""
    y = torch.empty(x.shape[0], w.shape[0], device="cuda")
    grid = (triton.cdiv(x.shape[0], block_m), w.shape[0] // 128)
    kernel = _product[grid](x, w, y, x.shape[0], w.shape[0], x.shape[1], block_m, 128, block_k, num_warps=warps)
    ptx = kernel.asm["ptx"]
    return y, "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "other"


def tiles() -> list[dict[str, Any]]:
    found = []
    generator = torch.Generator("cuda").manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        for inner in (1024, 4096):
            x = torch.randn(256, inner, device="cuda", generator=generator).to(dtype)
            w = torch.randn(1024, inner, device="cuda", generator=generator).to(dtype)
            for block_k in (32, 64, 128):
                reference, family = product(x, w, 16, block_k, 4)
                for block_m, warps in ((16, 4), (32, 4), (64, 4), (64, 8), (128, 4), (128, 8)):
                    for rows in (256, 16):
                        y, other = product(x[:rows].contiguous(), w, block_m, block_k, warps)
                        found.append(
                            {
                                "dtype": str(dtype).removeprefix("torch."),
                                "K": inner,
                                "block_k": block_k,
                                "tile_rows": block_m,
                                "warps": warps,
                                "rows": rows,
                                "instructions": f"{family} against {other}",
                                "equal": bool(torch.equal(y, reference[:rows])),
                                "largest_difference": float((y - reference[:rows]).abs().max()),
                            }
                        )
    return found


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


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Arena:
    """Address space that keeps its place while its memory comes and goes (CUDA driver API, virtual memory)."""

    def __init__(self, num_bytes: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._properties = _Properties(type=1, location=_Location(1, torch.cuda.current_device()))
        step = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._properties), 0)
        self.num_bytes = -(-num_bytes // step.value) * step.value
        self.address = ctypes.c_uint64()
        self._size = ctypes.c_size_t(self.num_bytes)
        zero = ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve", ctypes.byref(self.address), self._size, ctypes.c_size_t(0), zero, ctypes.c_uint64(0)
        )
        self._handle = ctypes.c_uint64()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} gave {code}")

    def commit(self) -> None:
        self._call(
            "cuMemCreate", ctypes.byref(self._handle), self._size, ctypes.byref(self._properties), ctypes.c_uint64(0)
        )
        self._call("cuMemMap", self.address, self._size, ctypes.c_size_t(0), self._handle, ctypes.c_uint64(0))
        access = _Access(self._properties.location, 3)
        self._call("cuMemSetAccess", self.address, self._size, ctypes.byref(access), ctypes.c_size_t(1))

    def release(self) -> None:
        self._call("cuMemUnmap", self.address, self._size)
        self._call("cuMemRelease", self._handle)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes // 4,),
            "typestr": "<f4",
            "data": (self.address.value, False),
            "version": 3,
        }


def arenas(num_bytes: int = 8 << 30) -> dict[str, Any]:
    torch.zeros(1, device="cuda")
    arena = Arena(num_bytes)
    arena.commit()
    tensor = torch.as_tensor(arena, device="cuda")
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
        "same_address": torch.as_tensor(arena, device="cuda").data_ptr() == address,
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
    for name, probe in (("tiles", tiles), ("graph_replay_microseconds", graphs), ("arena", arenas)):
        try:
            report[name] = probe()
        except Exception as error:
            report[name] = f"{type(error).__name__}: {error}"
    text = json.dumps(report, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    unequal = [row for row in report["tiles"] if isinstance(row, dict) and not row["equal"]]
    print(json.dumps({**report, "tiles": f"{len(report['tiles'])} compared, {len(unequal)} unequal"}, indent=1))
    for row in unequal[:20]:
        print(row)


if __name__ == "__main__":
    main()
