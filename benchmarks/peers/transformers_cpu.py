"""A peer for `perdure bench offline --against`: transformers' `generate`, one padded batch, fp32, sdpa, greedy.

    perdure bench offline cpu16 --model DIR --against "python benchmarks/peers/transformers_cpu.py {model} {workload}"

The model is a Hugging Face directory. Prompts are padded on the left into one batch; every request gets as many new
tokens as the longest, and keeps its own. Threads are torch's own number, as ours: set OMP_NUM_THREADS for both. The
warm-up is the same batch with two new tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

PAD = 0  # hidden by the attention mask, so any id does


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, [prompts, longest]."""
    longest = max(map(len, prompts))
    ids = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("workload", type=Path, help="JSON with prompt_ids and new_tokens")
    args = parser.parse_args()

    workload = json.loads(args.workload.read_text())
    prompts, asked = workload["prompt_ids"], workload["new_tokens"]
    counts = [asked] * len(prompts) if isinstance(asked, int) else asked
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    ids, mask = padded(prompts)

    def generate(count: int) -> torch.Tensor:
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=PAD, use_cache=True
        )

    with torch.inference_mode():
        generate(2)
        cpu_start, start = time.process_time(), time.perf_counter()
        output = generate(max(counts))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    new = [row[:count] for row, count in zip(output[:, ids.shape[1] :].tolist(), counts, strict=True)]
    assert [len(row) for row in new] == counts, "an end id ended a request"
    found = {
        "name": f"transformers {transformers.__version__}",
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "threads": torch.get_num_threads(),
        "output_sha256": hashlib.sha256(json.dumps(new, separators=(",", ":")).encode()).hexdigest(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
