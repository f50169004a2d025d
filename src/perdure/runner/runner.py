"""Executes one plan: applies its deltas, runs the model, samples, scores, and says what came of it.

- Owns every tensor of the engine but the weights: pages, device rows, scratch.
- Executes what the plan says and decides nothing; plans must come in order, one at a time.
- With `batch_invariant` a row's result has the same bits whatever else the step holds.

Shapes: M = tokens of the step, padded, Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from perdure.api.directive import Clear, Directive
from perdure.api.ending import Failure
from perdure.api.plan import DeviceRow, StepOutput, StepPlan
from perdure.models.base import Model, Turn
from perdure.models.store import Store
from perdure.models.weight_set import WeightSet
from perdure.ops.attention import CacheShape, make_attention
from perdure.ops.kv_write import plan_kv_write
from perdure.ops.native import library
from perdure.runner.bursts import joined, steps_of
from perdure.runner.failed_rows import FailedRows, failed_output, with_rows, without_rows
from perdure.runner.functions import Functions
from perdure.runner.grammars import Grammars
from perdure.runner.inputs import PackedStep, pack
from perdure.runner.kv_store import KVStore
from perdure.runner.masks import Masks
from perdure.runner.memory import Memory
from perdure.runner.row_store import RowStore
from perdure.runner.sampler import Sampler, ScoreEntries
from perdure.runner.shapes import ShapeRules, ShapeSet


class Runner:
    """One model on this process's CPU.

    attention_backend: "auto" or a name of `ops.attention.FORMS`; the attribute of that name says what was chosen, and
    `attention` says it with everything that its bits depend on.
    weights: of the model, for directives about them; None = there are none.
    grammars: what rows with structured outputs are held to; None = there are no such rows.
    row_tile: pad a step's rows to a multiple of it, where the model's products would do it otherwise. rules: of shapes
    to pad steps to; None = to none. kv_dtype: of pages.
    ValueError: an unknown backend, or one that cannot do what was asked or what the model needs.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        batch_invariant: bool = True,
        attention_backend: str = "auto",
        row_tile: int = 1,
        rules: ShapeRules | None = None,
        weights: WeightSet | None = None,
        grammars: Grammars | None = None,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        config = model.config
        shape = CacheShape(config.num_heads, config.num_kv_heads, config.head_dim, num_pages, page_size)
        self._model = model
        self._shape = shape
        self._kinds = config.attention
        self._forms = {
            kind: make_attention(attention_backend, shape, kind, batch_invariant=batch_invariant)
            for kind in dict.fromkeys(self._kinds)
        }
        self.attention_backend = self._forms[self._kinds[0]].name
        self.sampling_backend = "torch"
        self.attention = ", ".join(dict.fromkeys(form.kernel for form in self._forms.values()))
        if kv_dtype != torch.float32:
            self.attention += f" over pages in {str(kv_dtype).removeprefix('torch.')}"
        self._row_tile = row_tile
        self.shapes = None if rules is None else ShapeSet(rules)
        self._native = library()
        self._failed = FailedRows()
        self._kv = KVStore(config, num_pages, page_size, kv_dtype)
        self.memory = Memory(self._kv, weights)
        self._rows = RowStore(max_num_seqs, -(-max_model_len // page_size), config.vocab_size)
        self.grammars = grammars or Grammars(None, config.vocab_size, ())
        self._masks = Masks(self.grammars, config.vocab_size)
        self._sampler = Sampler(model, self._rows, self._masks, self._row_tile)

    @property
    def functions(self) -> Functions:
        """Where callers put the logits processors that their requests name."""
        return self._rows.adjustments.functions

    @property
    def kv_bytes(self) -> int:
        """Size of the pool of pages."""
        return self._kv.num_bytes

    def release(self) -> None:
        """Give the pool's memory and threads back, once nothing will be executed any more."""
        self._kv.release()
        self._masks.close()
        self.grammars.close()

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run the step. A row's own failure is an entry of `errors`; an exception means that the whole step failed, and
        the caller must say so by `fail`."""
        if plan.num_steps > 1:
            return joined(plan, [(rows, self._step_of_burst(step)) for rows, step in steps_of(plan)])
        return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepOutput:
        failed = self._failed.of(plan)
        output = self._run(plan) if not failed else with_rows(self._run(without_rows(plan, failed)), failed, plan)
        self._failed.learn(plan.slot, output.errors)
        return output

    def _step_of_burst(self, step: StepPlan) -> StepOutput:
        """One that raises takes nothing from those before it."""
        try:
            return self._execute(step)
        except Exception as error:
            why = Failure.of_step(error)
            self.fail(step.slot, why)
            return failed_output(step, why)

    def check(self, rows: Iterable[DeviceRow]) -> None:
        """The device rows hold what the core says they do. Raises AssertionError."""
        for row in rows:
            self._rows.check(row)

    @torch.inference_mode()
    def perform(self, directive: Directive) -> str:
        """Between steps (`memory.Memory.perform`)."""
        digest = self.memory.perform(directive)
        if isinstance(directive, Clear):
            self._failed.clear()
        return digest

    @property
    def staged(self) -> dict[int, Store]:
        """Weights to be loaded, by the ticket of their update."""
        return self.memory.staged

    def fail(self, slots: Iterable[int], why: Failure) -> None:
        """The rows in these slots hold nothing to go on from: they fail in steps launched already, and write nothing,
        until their slot gets another request."""
        self._failed.add(slots, why)

    def _physical(self, step: PackedStep) -> int:
        """How many tokens the step is padded to."""
        num_tokens, lengths = len(step.token_ids), np.diff(step.offsets)
        num_prompts = int(np.count_nonzero(lengths > 1))
        if self.shapes is not None:
            shape = self.shapes.take(num_tokens, num_prompts, len(lengths) - num_prompts)
            num_tokens = num_tokens if shape is None else shape.num_tokens
        return -(-num_tokens // self._row_tile) * self._row_tile

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepOutput:
        if self._native is not None:
            self._native.follow_torch()  # this thread's own number
        # First of all and whatever happens after: later steps rely on these.
        self._rows.apply(plan)
        if plan.poisoned_pages:
            self._kv.poison(plan.poisoned_pages)
        self._kv.clear(plan.fresh_pages)
        self._kv.copy(plan.copy_from, plan.copy_to, plan.copy_length)
        if not plan.slot:
            return StepOutput.empty(plan.step)

        step = pack(plan, self._rows, self._shape.page_size)
        step = step.padded(self._physical(step))
        self._rows.advance(step.slots, step.ends)
        attention = step.attention(self._rows, self._shape.page_size)
        planned = {kind: form.plan(attention) for kind, form in self._forms.items()}
        kv_write = plan_kv_write(self._shape, step.kv_slots, self._kv.dtype)

        def attend(layer: int, qk: torch.Tensor, v: torch.Tensor, turn: Turn) -> torch.Tensor:
            cache, turned, num_heads = self._kv.layers[layer], turn(qk), self._shape.num_heads
            q, k = turned[:, :num_heads], turned[:, num_heads:]
            kv_write.run(k.float(), v.float(), cache)  # whatever the model computes in
            return planned[self._kinds[layer]].run(q.float(), cache, turn.sinks).to(q.dtype)

        self._masks.begin(self._rows.adjustments.wanted_masks(step.slots[step.sampled]))
        step, wanted = step.narrowed(self._row_tile)
        hidden = self._model.forward(
            torch.from_numpy(step.token_ids),
            torch.from_numpy(step.positions),
            attend,
            None if wanted is None else torch.from_numpy(wanted),
        )

        errors: dict[int, Failure] = {}
        prompt_scores = self._sampler.score_targets(hidden, step.targets, step.slots, errors)
        num_sampled = np.zeros(len(plan.slot), np.int64)
        tokens: list[int] = []
        scores = ScoreEntries()
        if len(step.sampled):
            slots, positions = step.slots[step.sampled], step.ends[step.sampled]
            rows, drawn, scores = self._sampler.sample(
                hidden, step.sampled_hidden, step.sampled, slots, positions, errors
            )
            self._rows.sampled(step.slots[rows], drawn)
            num_sampled[rows] = 1
            tokens = drawn.tolist()
        return StepOutput(
            step=plan.step,
            num_sampled=num_sampled.tolist(),
            tokens=tokens,
            records=scores.columns(errors),
            prompt_records=prompt_scores.columns(),
            errors=sorted(errors.items()),
        )
