"""How long an engine takes to be ready with weights in files: a checkpoint in the shape of Llama-3.1-8B, written first.

python benchmarks/start.py FOLDER REPORT.json [--layers 32] [--only load]

- FOLDER: where 16 GB have room; they are removed at the end. What is read is in the system's cache by then.
- first: a start, with whatever kernels must be compiled. drawn: one without files, so pool and graphs alone. load: the
  weights alone. start: all of it, again. The report is written after each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_sections.jobs import LLAMA_8B

from perdure import LLM, SamplingParams
from perdure.models.base import Part
from perdure.models.config import config_from_directory
from perdure.models.registry import find_family
from perdure.models.weights import load_model

NUM_FILES = 4
ENGINE: dict[str, Any] = {"device": "cuda", "max_num_seqs": 256, "max_model_len": 2048}


def write_checkpoint(folder: Path, num_layers: int) -> int:
    """Drawn weights in bf16, in four files. Returns their bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": num_layers}))
    config = config_from_directory(folder)
    table = find_family(config.architecture, str(folder)).parameters(config).values()
    parts = [part for parts in table for part in parts]
    shares = [parts[number::NUM_FILES] for number in range(NUM_FILES)]
    names = [f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors" for number in range(NUM_FILES)]
    index = {part.hf: name for name, share in zip(names, shares, strict=True) for part in share}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    with ThreadPoolExecutor() as threads:
        return sum(threads.map(write_file, (folder / name for name in names), shares, range(NUM_FILES)))


def write_file(path: Path, parts: list[Part], seed: int) -> int:
    """One file of safetensors, piece by piece: nothing holds it whole."""
    generator = torch.Generator("cuda").manual_seed(seed)
    header: dict[str, Any] = {}
    end = 0
    for part in parts:
        begin, end = end, end + 2 * torch.Size(part.shape).numel()
        header[part.hf] = {"dtype": "BF16", "shape": list(part.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for part in parts:
            drawn = torch.empty(part.shape, dtype=torch.bfloat16, device="cuda")
            drawn = drawn.fill_(1.0) if drawn.dim() == 1 else drawn.normal_(0.0, 0.02, generator=generator)
            file.write(drawn.cpu().view(torch.uint8).numpy().data)
    return end


def start(folder: Path, **config: Any) -> dict[str, Any]:
    """Seconds until an engine is ready, and until it has answered."""
    begin = time.perf_counter()
    with LLM(str(folder), **ENGINE, **config) as llm:
        ready = time.perf_counter() - begin
        (output,) = llm.generate([list(range(100, 228))], SamplingParams(max_tokens=1, ignore_eos=True))
        assert output.error is None and len(output.outputs[0].token_ids) == 1
        return {"ready_s": round(ready, 2), "answered_s": round(time.perf_counter() - begin, 2)}


def load(folder: Path, num_bytes: int) -> dict[str, Any]:
    begin = time.perf_counter()
    loaded = load_model(folder, device="cuda")
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return {
        "seconds": round(seconds, 2),
        "gb_per_s": round(num_bytes / seconds / 1e9, 2),
        "digest": loaded.weights.digest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--only", choices=["load"], default=None)
    asked = parser.parse_args()
    folder = asked.folder / "checkpoint"
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    begin = time.perf_counter()
    try:
        num_bytes = write_checkpoint(folder, asked.layers)
        report |= {"gb": round(num_bytes / 1e9, 2), "written_s": round(time.perf_counter() - begin, 2)}
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "first": lambda: start(folder),
            "drawn": lambda: start(folder, load_format="dummy"),
            "load": lambda: load(folder, num_bytes),
            "start": lambda: start(folder),
        }
        for name, measure in steps.items():
            if asked.only in (None, name):
                torch.cuda.empty_cache()
                report[name] = measure()
                asked.report.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
