"""Plans by hand for one runner: rows said in few words, pages handed out, and a dense oracle of the model.

Every request gets pages of its own, in shuffled order, cleared in its first plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from perdure.api.plan import DEVICE_POSITION, NO_LOGPROBS, RowInit, ScoreColumns, StepOutput, StepPlan
from perdure.models.base import Model, ModelConfig, Turn, Weights, joined_shape
from perdure.models.llama import LlamaModel, parameters
from perdure.ops.attention import LayerAttention
from perdure.ops.kernels import choose_kernels
from perdure.runner.runner import Runner

VOCAB = 200
CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rotary_dim=8,
    attention=(LayerAttention(8**-0.5),) * 2,
    vocab_size=VOCAB,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=None,
    eos_token_ids=(),
    dtype=torch.float32,
)


def tiny_model(config: ModelConfig = CONFIG) -> LlamaModel:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(joined_shape(parts))
        if "norm" in name
        else torch.randn(joined_shape(parts), generator=generator)
        for name, parts in parameters(config).items()
    }
    scaled = {name: w if "norm" in name else w / w.shape[-1] ** 0.5 for name, w in weights.items()}
    scaled["head.weight"] *= 4  # logits spread enough for distinct probabilities
    return LlamaModel(config, Weights(scaled), choose_kernels("auto", torch.device("cpu"), torch.float32))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()


def dense_logits(model: Model, ids: list[int]) -> np.ndarray:
    """Logits [n, V] of a whole sequence, with ordinary causal attention."""

    def attend(layer: int, qk: torch.Tensor, v: torch.Tensor, turn: Turn) -> torch.Tensor:
        q, k = turn(qk).split((qk.shape[1] - v.shape[1], v.shape[1]), 1)
        heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
        mixed = functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1)

    with torch.inference_mode():
        return model.logits(model.forward(torch.tensor(ids), torch.arange(len(ids)), attend)).numpy()


@dataclass
class Row:
    """One row of a plan: tokens from `start` on, or None for the position and token on the device, and so many steps
    from there."""

    slot: int
    tokens: list[int] | None = None
    start: int = 0
    sample: bool = True
    targets: list[int] = field(default_factory=list)
    target_start: int = 0
    steps: int = 1


class Driver:
    """A runner and the bookkeeping a scheduler would do for it."""

    def __init__(
        self, model: Model, *, page_size: int = 4, num_slots: int = 8, max_len: int = 120, **config: Any
    ) -> None:
        self.pages_per_slot = -(-max_len // page_size)
        num_pages = num_slots * self.pages_per_slot
        self.runner = Runner(
            model,
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=num_slots,
            max_model_len=max_len,
            **config,
        )
        self.free = np.random.default_rng(0).permutation(num_pages).tolist()
        self.requests = [-1] * num_slots
        self.step = 0
        self.next_request = 100
        self.pending: list[tuple[RowInit, list[int]]] = []

    def admit(self, slot: int, prompt_length: int, **settings: Any) -> None:
        """A request takes the slot with the next plan; greedy unless told."""
        defaults = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, min_tokens=0, masked_ids=())
        scores = dict(num_logprobs=NO_LOGPROBS, num_prompt_logprobs=NO_LOGPROBS, processed_logprobs=False)
        self.requests[slot] = self.next_request
        self.next_request += 1
        init = RowInit(slot, self.requests[slot], prompt_length, **{**defaults, **scores, **settings})
        pages = [self.free.pop() for _ in range(self.pages_per_slot)]
        self.free = pages[:2] + self.free  # some pages are used again, dirty
        self.pending.append((init, pages))

    def plan(self, *rows: Row) -> StepPlan:
        pending, self.pending = self.pending, []
        table = [(init.slot, index, page) for init, pages in pending for index, page in enumerate(pages)]
        self.step += 1
        return StepPlan(
            step=self.step,
            request=[self.requests[row.slot] for row in rows],
            slot=[row.slot for row in rows],
            start=[DEVICE_POSITION if row.tokens is None else row.start for row in rows],
            length=[row.steps if row.tokens is None else len(row.tokens) for row in rows],
            num_tokens=[len(row.tokens or ()) for row in rows],
            tokens=[token for row in rows for token in row.tokens or ()],
            sample=[int(row.sample) for row in rows],
            target_start=[row.target_start for row in rows],
            num_targets=[len(row.targets) for row in rows],
            targets=[token for row in rows for token in row.targets],
            row_inits=[init for init, _ in pending],
            table_slot=[slot for slot, _, _ in table],
            table_index=[index for _, index, _ in table],
            table_page=[page for _, _, page in table],
            fresh_pages=[page for _, _, page in table],
        )

    def run(self, *rows: Row) -> StepOutput:
        return self.runner.execute(self.plan(*rows))

    def decode(self, slots: list[int], num_steps: int) -> list[list[int]]:
        """Tokens of each slot over steps whose rows go on where they stand on the device."""
        steps = [self.run(*(Row(slot) for slot in slots)).tokens for _ in range(num_steps)]
        return [list(tokens) for tokens in zip(*steps)]


def entries(columns: ScoreColumns) -> list[tuple]:
    """(row, position, chosen, rank, top) of each."""
    ends = np.cumsum(columns.num_top).tolist()
    ids, scores = np.frombuffer(columns.top_ids, "<i4").tolist(), np.frombuffer(columns.top_scores, "<f4").tolist()
    tops = [list(zip(ids[e - n : e], scores[e - n : e])) for e, n in zip(ends, columns.num_top)]
    return list(zip(columns.row, columns.position, columns.chosen, columns.rank, tops))


def prompt_scores(model: Model, ids: list[int], size: int, neighbour: bool = False) -> list[tuple]:
    """All entries without their row, gathered over chunks of a size."""
    driver = Driver(model)
    driver.admit(0, len(ids), num_prompt_logprobs=3)
    driver.admit(1, 6)
    if neighbour:
        driver.run(Row(1, prompt(6)))
    found = []
    for start in range(0, len(ids), size):
        end = min(start + size, len(ids))
        targets = ids[start + 1 : end + 1]
        row = Row(0, ids[start:end], start, end == len(ids), targets, start + 1)
        output = driver.run(*([Row(1)] if neighbour else []), row)
        assert set(output.prompt_records.row) <= {int(neighbour)}
        found += [entry[1:] for entry in entries(output.prompt_records)]
    return found
