"""Makes docs/performance.svg of a report of `make gpu`: each workload, other engines, and what the hardware allows.

    python docs/performance.py benchmarks/results/gpu-....json        (needs matplotlib)

A bar is a speed as a part of the floor: of what the bytes that must move and the operations that must be done allow on
this GPU. The other engines were run on an H200 on 2026-11-29, on the same workloads, by their own ways to measure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib import pyplot

PEERS: dict[str, dict[str, float]] = {
    "vLLM 0.26.0": {"nano": 21_970, "q1": 530, "b1": 201, "b64": 6_583, "b256": 6_054, "prefill": 43_110},
    "SGLang 0.5.14": {"nano": 21_230, "q1": 581, "b1": 204, "b64": 6_539, "b256": 6_129, "prefill": 43_580},
    "Megatron core 0.19.2": {"nano": 18_140, "q1": 377, "b1": 161, "b64": 5_589, "b256": 5_865, "prefill": 42_570},
    "nano-vllm": {"nano": 17_960, "q1": 433},
    "transformers, continuous batching": {"nano": 10_780},
}
WORKLOADS = {"nano": "Qwen3-0.6B\n256 requests", "q1": "Qwen3-0.6B\n1 request", "b1": "8B\n1 request",
             "b64": "8B\n64 requests", "b256": "8B\n256 requests", "prefill": "8B\nprompts only"}  # fmt: skip
COLOURS = ["#1b5e8c", "#e08e45", "#7a9e7e", "#b5838d", "#8d8d8d", "#c9b458"]


def main(report: Path) -> None:
    measured = json.loads(report.read_text())
    ours = {name: measured["workloads"][name] for name in WORKLOADS if name in measured["workloads"]}
    engines = {"perdure": {name: one["value"] for name, one in ours.items()}} | PEERS
    width = 0.8 / len(engines)
    pyplot.rcParams["svg.hashsalt"] = "perdure"
    figure, axes = pyplot.subplots(figsize=(10, 4.2))
    for at, (engine, speeds) in enumerate(engines.items()):
        found = [
            (place, speeds[name], one["floor"]) for place, (name, one) in enumerate(ours.items()) if name in speeds
        ]
        places = [place + at * width - 0.4 + width / 2 for place, _, _ in found]
        bars = axes.bar(
            places, [speed / floor for _, speed, floor in found], width * 0.92, label=engine, color=COLOURS[at]
        )
        labels = [f"{speed:,.0f}" for _, speed, _ in found]
        axes.bar_label(bars, labels, fontsize=6, rotation=90, padding=2)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.text(len(ours) - 0.55, 1.01, "what the hardware allows", fontsize=7, ha="right", va="bottom")
    axes.set_xticks(range(len(ours)), [f"{name}\n{WORKLOADS[name]}" for name in ours], fontsize=8)
    axes.set_ylabel("part of the hardware's speed")
    axes.set_ylim(0, 1.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, ncols=2, loc="upper left", bbox_to_anchor=(0.0, 1.16), frameon=False)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".svg"), format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
