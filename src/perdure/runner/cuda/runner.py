"""Executes plans on a GPU without waiting for it: a step is packed, copied and launched, and its ticket waits.

- What a step needs of its rows is with it in one block of numbers (`step`); pages, block tables and the tokens sampled
  last stay on the device, where the next step reads them.
- A step that a captured shape fits is padded to it and replayed, others run as they are; both are one function. A
  burst is its first step's shape several times, with numbers that are all sent before (`bursts`).
- Tokens are drawn and scored there (`sampler`), whatever was asked but functions of the caller's and scores of whole
  vocabularies: such rows are sampled on the host, and their step waits for its logits.
- The host's account of the rows (`runner.row_store`) is complete but for tokens that are not back yet.

Shapes: S slots, W = the most pages of a request, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import Thread

import numpy as np
import torch
from torch import Tensor

from perdure.api.directive import Clear, Directive, Outcome, Wake
from perdure.api.ending import Failure
from perdure.api.plan import DeviceRow, StepOutput, StepPlan
from perdure.models.base import Model, Turn
from perdure.models.store import Store
from perdure.models.weight_set import WeightSet
from perdure.ops.attention import CacheShape
from perdure.ops.attention.paged import PagedRows, make_paged
from perdure.runner.cuda.bursts import Burst, Bursts
from perdure.runner.cuda.graphs import Graphs
from perdure.runner.cuda.pages import DevicePages, to_device
from perdure.runner.cuda.sampler import DeviceSampler, Parts, as_outputs, filter_of, of_outputs
from perdure.runner.cuda.scores import PendingScores, score_targets
from perdure.runner.cuda.step import StepColumns, StepSize, blocks_of, longest_first
from perdure.runner.cuda.ticket import Launched, LaunchedBurst, StagedStep, Staging, StepTicket
from perdure.runner.failed_rows import FailedRows, failed_output, with_rows, without_rows
from perdure.runner.functions import Functions
from perdure.runner.grammars import Grammars
from perdure.runner.inputs import Ints, PackedStep, pack
from perdure.runner.masks import Masks
from perdure.runner.memory import Memory
from perdure.runner.row_store import RowStore
from perdure.runner.sampler import Sampler, ScoreEntries
from perdure.runner.shapes import Shape, ShapeRules, ShapeSet


class CudaRunner:
    """One model on one device (`perdure.runner.base.Device`).

    kv_dtype: of pages; None = dtype. max_num_batched_tokens: the most tokens of a step. has_managed_pages: the pool is
    managed memory. rules: of the shapes to capture; None = every step runs as it is. weights: of the model, for
    directives about them; None = there are none. grammars: what rows with structured outputs are held to; None = there
    are no such rows. sampling_backend: "flashinfer", or the engine's own form.
    ValueError: an unknown attention backend, a sampling backend that is not here, too large a managed pool.
    MemoryError: no room for the pool.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        attention_backend: str = "auto",
        batch_invariant: bool = False,
        sampling_backend: str = "auto",
        has_managed_pages: bool = False,
        rules: ShapeRules | None = None,
        weights: WeightSet | None = None,
        grammars: Grammars | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        config = model.config
        cache = CacheShape(config.num_heads, config.num_kv_heads, config.head_dim, num_pages, page_size)
        self._model = model
        self._device = device
        self._page_size = page_size
        self._kinds = config.attention
        kinds = dict.fromkeys(self._kinds)
        self._forms = {
            kind: make_paged(
                attention_backend, cache, kind, dtype, device, kv_dtype=kv_dtype, batch_invariant=batch_invariant
            )
            for kind in kinds
        }
        form = self._forms[self._kinds[0]]
        self.attention_backend, self.attention = form.name, form.kernel
        if kv_dtype not in (None, dtype):
            self.attention += f" over pages in {str(kv_dtype).removeprefix('torch.')}"
        self._block_size = form.block_size
        self.sampling_backend = "flashinfer" if sampling_backend == "flashinfer" else "torch"
        self.threads: tuple[Thread, ...] = ()
        self._failed = FailedRows()
        self._rows = RowStore(max_num_seqs, -(-max_model_len // page_size), config.vocab_size)
        self.grammars = grammars or Grammars(None, config.vocab_size, ())
        self._masks = Masks(self.grammars, config.vocab_size)
        self._host_sampler = Sampler(model, self._rows, self._masks, 1)
        with torch.inference_mode():
            self._kv = DevicePages(config, num_pages, page_size, kv_dtype or dtype, device, has_managed_pages)
            self.memory = Memory(self._kv, weights)
            self._table = torch.zeros(self._rows.block_table.shape, dtype=torch.int32, device=device)
            self._sampler = DeviceSampler(
                self._rows, self._masks, config.vocab_size, max_model_len, device, filter_of(sampling_backend)
            )
            self.shapes = None if rules is None else ShapeSet(rules)
            captured = [] if self.shapes is None else self.shapes.shapes
            most = max(max_num_batched_tokens, *(shape.num_tokens for shape in captured), 0)
            blocks = -(-most // self._block_size) + max_num_seqs
            largest = StepSize(most, max_num_seqs, blocks, max_num_seqs)
            self._words = torch.zeros(largest.num_words, dtype=torch.int32, device=device)
            most = max(max_num_seqs, *(shape.num_tokens for shape in captured if not shape.num_prompts), 0)
            decoding = StepSize(most, max_num_seqs, 0, max_num_seqs)
            self._bursts = Bursts(self._rows, self._sampler, page_size, decoding)
            self._staging = Staging(max(largest.num_words, self._bursts.num_words), self._bursts.results)
            self._largest = largest
            self._is_stale = False
            self.graphs: Graphs | None = None
            try:
                if captured:
                    self.graphs = Graphs(captured, self._pad_shape, self._compute_shape, device)
            except BaseException:
                self.release()
                raise

    @property
    def functions(self) -> Functions:
        """Where callers put the logits processors that their requests name."""
        return self._rows.adjustments.functions

    @property
    def kv_bytes(self) -> int:
        """Size of the pool of pages."""
        return self._kv.num_bytes

    # What the loop needs of a device

    def launch(self, plan: StepPlan) -> StepTicket:
        """Hand the step to the device. What goes wrong before it is there fails the step's rows."""
        try:
            return self._launch(plan)
        except Exception as error:
            why = Failure.of_step(error)
            self.fail(plan.slot, why)
            return StepTicket.of(failed_output(plan, why))

    def perform(self, directive: Directive) -> Outcome:
        """Between steps: give memory back, take it again, load weights."""
        try:
            with torch.inference_mode():
                digest = self.memory.perform(directive)
                self._recapture(directive)
        except Exception as error:
            return self.memory.failed(error)
        if isinstance(directive, Clear):
            self._failed.clear()
        return Outcome(weights=digest)

    def _recapture(self, directive: Directive) -> None:
        """Weights may have come back to other addresses (pages never do): then graphs are captured anew, once pages are
        there to be looked at."""
        self._is_stale |= isinstance(directive, Wake) and directive.weights
        if self._is_stale and self._kv.is_here and self.graphs is not None:
            self.graphs.capture()
            self._is_stale = False

    @property
    def staged(self) -> dict[int, Store]:
        """Weights to be loaded, by the ticket of their update."""
        return self.memory.staged

    def check(self, rows: Sequence[DeviceRow]) -> None:
        """The device's rows, and the host's account of them, are what the core says. Raises AssertionError."""
        table, last_token = self._table.cpu().numpy(), self._sampler.last_token.cpu().numpy()
        over = self._sampler.row_ends.over.cpu().numpy()
        for row in rows:
            self._rows.check(row)
            slot = row.settings.slot
            assert not over[slot], f"slot {slot}: the device takes it to have ended"
            assert table[slot, : len(row.pages)].tolist() == row.pages, f"slot {slot}: the device has other pages"
            if row.last_token is not None:
                assert last_token[slot] == row.last_token, f"slot {slot}: the device holds another last token"
        self._sampler.check([row.settings.slot for row in rows])

    def close(self) -> None:
        """Let what was launched end."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def release(self) -> None:
        """Give the pool's memory and threads back, once nothing will be executed any more."""
        self._masks.close()
        self.grammars.close()
        self.graphs = None
        self._kv.release()

    @torch.inference_mode()
    def run_padding(self) -> None:
        """Run the largest step there can be, without a row: what it takes can be measured."""
        self._pad(self._largest)
        self._compute_size(self._largest)

    def _pad_shape(self, shape: Shape) -> None:
        self._pad(StepSize.of(shape, self._block_size))

    def _pad(self, size: StepSize) -> None:
        """Put a step without a row in place."""
        words = torch.zeros(size.num_words, dtype=torch.int32)
        StepColumns.on_host(words.numpy(), size).pad(self._sampler.nobody)
        self._words[: size.num_words].copy_(words)

    def fail(self, slots: Iterable[int], why: Failure) -> None:
        """The rows in these slots hold nothing to go on from, until their slot gets another request."""
        self._failed.add(slots, why)

    # A step

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> StepTicket:
        failed = self._failed.of(plan)
        whole, plan = plan, without_rows(plan, failed) if failed else plan
        self._apply(plan)
        if not plan.slot:
            return StepTicket.of(with_rows(StepOutput.empty(plan.step), failed, whole))

        step = pack(plan, self._rows, self._page_size)
        if plan.num_steps > 1:
            return self._launch_burst(plan, Burst(step, np.array(plan.length)), whole, failed)
        self._rows.advance(step.slots, step.ends)
        self._masks.begin(self._rows.adjustments.wanted_masks(step.slots[step.sampled]))
        parts = self._sampler.parts(step)
        rows = step.sampled[parts.on_device]
        launched = Launched(plan.step, plan.request, rows, step.slots[rows], step.slots, masked=rows[parts.masked])
        staged = self._staging.take()
        try:
            hidden, step = self._compute(step, parts, staged, launched)
            launched.prompt_scores, launched.prompt_entries = self._score_targets(hidden, step, launched.errors)
            staged.send(self._sampler.results[None], len(parts.on_device))
            if len(parts.on_host):
                self._sample_on_host(hidden, step, parts.on_host, launched)
        except BaseException:
            self._staging.give_back(staged)
            raise
        return StepTicket(self._finish, launched, staged, self._staging, whole, failed)

    def _launch_burst(self, plan: StepPlan, burst: Burst, whole: StepPlan, failed: Mapping[int, Failure]) -> StepTicket:
        """The same of several steps in a row."""
        first, count = burst.first, len(burst.lengths)
        self._rows.advance(first.slots, burst.ends)
        shape = None if self.shapes is None else self.shapes.take(count, 0, count, burst.num_steps)
        size = StepSize(count, count, 0, count) if shape is None else StepSize.of(shape, self._block_size)
        launched = LaunchedBurst(
            plan.step, plan.request, first.sampled, first.slots, first.slots, lengths=burst.lengths, first=first.ends
        )
        staged, words = self._staging.take(), self._words[: size.num_words]
        try:
            launched.scores = self._bursts.run(
                burst, size, staged, words, lambda step: self._compute_words(size, shape, partial(burst.at, step))
            )
            staged.send(self._bursts.results[: burst.num_steps], count)
        except BaseException:
            self._staging.give_back(staged)
            raise
        return StepTicket(self._finish, launched, staged, self._staging, whole, failed)

    def _apply(self, plan: StepPlan) -> None:
        """The plan's deltas. First of all and whatever happens after: later steps rely on these."""
        self._rows.apply(plan)
        self._sampler.admit(plan.row_inits)
        if plan.table_slot:
            entries = to_device([plan.table_slot, plan.table_index, plan.table_page], torch.int32, self._device)
            self._table[entries[0], entries[1]] = entries[2]
        if plan.poisoned_pages:
            self._kv.poison(plan.poisoned_pages)
        self._kv.clear(plan.fresh_pages)
        self._kv.copy(plan.copy_from, plan.copy_to, plan.copy_length)

    def _compute(
        self, step: PackedStep, parts: Parts, staged: StagedStep, launched: Launched
    ) -> tuple[Tensor, PackedStep]:
        """Hidden states, and the step as they are of it (`narrowed`); tokens and scores of rows that the device samples
        are on their way."""
        lengths = np.diff(step.offsets)
        ones, prompts = np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)
        ones = longest_first(step, ones)
        num_tokens = int(step.offsets[-1])
        shape = None if self.shapes is None else self.shapes.take(num_tokens, len(prompts), len(ones))
        if shape is not None and len(ones) > shape.num_decodes:  # the rest goes in the places of prompts
            prompts = np.concatenate([prompts, ones[shape.num_decodes :]])
            ones = ones[: shape.num_decodes]
        blocks = blocks_of(step, prompts, self._block_size)
        wanted = None
        if shape is None:
            step, wanted = step.narrowed()
        count = len(parts.on_device)
        size = (
            StepSize(num_tokens, len(ones), len(blocks), count)
            if shape is None
            else StepSize.of(shape, self._block_size)
        )
        columns = StepColumns.on_host(staged.words[: size.num_words], size)
        columns.pad(self._sampler.nobody)
        columns.fill(step, ones, blocks, parts.on_device)
        self._sampler.fill(columns.samples, step, parts)
        staged.copy_to(self._words[: size.num_words])
        outputs = self._compute_words(size, shape, lambda: step, wanted)
        if not count:
            return outputs[0], step
        hidden, (drawn, kept) = outputs[0], of_outputs(outputs[1:])
        after = None
        if len(parts.masked):
            after = self._sampler.draw_masked(drawn.logits, step, parts, launched.errors)
        if self._sampler.any_scores(step, parts):
            settings = StepColumns.on_device(self._words[: size.num_words], size).samples.settings()
            launched.scores = self._sampler.scores(step, parts, (drawn, kept, settings), after)
        return hidden, step

    def _compute_words(
        self, size: StepSize, shape: Shape | None, step: Callable[[], PackedStep], wanted: Ints | None = None
    ) -> tuple[Tensor, ...]:
        """The step whose numbers are in place, by its graph if it has one."""
        if shape is not None and self.graphs is not None:
            return self.graphs.replay(shape)
        self._plan_attention(step)
        rows = None if wanted is None else to_device(wanted.tolist(), torch.int64, self._device)
        return self._compute_size(size, rows)

    def _plan_attention(self, step: Callable[[], PackedStep]) -> None:
        if planned := [form for form in self._forms.values() if form.is_planned]:
            rows = step().attention(self._rows, self._page_size)
            for form in planned:
                form.plan(rows)

    def _compute_shape(self, shape: Shape) -> tuple[Tensor, ...]:
        return self._compute_size(StepSize.of(shape, self._block_size))

    def _compute_size(self, size: StepSize, wanted: Tensor | None = None) -> tuple[Tensor, ...]:
        """The step whose numbers lie in `self._words`: hidden states (wanted: of these rows), then what was drawn from.
        Waits for nothing and looks at no value."""
        step = StepColumns.on_device(self._words[: size.num_words], size)
        rows = PagedRows(self._table, step.index, step.slots, step.at, step.blocks)

        def attend(layer: int, qk: Tensor, v: Tensor, turn: Turn) -> Tensor:
            form = self._forms[self._kinds[layer]]
            return form.attend(qk, v, turn.turning, self._kv.layers[layer], rows, step.write, turn.sinks)

        tokens = step.tokens
        sampled_last = self._sampler.last_token[(~tokens).clamp_(min=0)]
        ids = torch.where(tokens >= 0, tokens, sampled_last).long()
        hidden = self._model.forward(ids, step.positions.long(), attend, wanted)
        if not size.samples:
            return (hidden,)
        x, kept = self._sampler.draw(self._model.logits(hidden[step.hidden]), step.samples.settings())
        return hidden, *as_outputs(x, kept)

    # Scores, and rows that the host samples

    def _score_targets(
        self, hidden: Tensor, step: PackedStep, errors: dict[int, Failure]
    ) -> tuple[list[PendingScores], ScoreEntries]:
        targets = step.targets
        if not len(targets.row):
            return [], ScoreEntries()
        num_top = self._rows.num_prompt_logprobs[step.slots[targets.row]]
        if num_top.min() < 0:
            return [], self._host_sampler.score_targets(hidden, targets, step.slots, errors)
        return score_targets(self._model, hidden, targets, num_top), ScoreEntries()

    def _sample_on_host(self, hidden: Tensor, step: PackedStep, on_host: Ints, launched: Launched) -> None:
        """What these rows asked is done by the host's forms, on logits that are waited for."""
        at = step.sampled[on_host]
        slots, positions = step.slots[at], step.ends[at]
        rows, tokens, scores = self._host_sampler.sample(
            hidden, step.sampled_hidden[on_host], at, slots, positions, launched.errors
        )
        self._rows.sampled(step.slots[rows], tokens)
        self._sampler.keep(step.slots[rows], tokens)
        launched.host_rows, launched.host_tokens, launched.host_entries = rows, tokens, scores

    def _finish(self, launched: Launched, tokens: Ints, codes: np.ndarray) -> StepOutput:
        """The output of a step that has run."""
        output, good = launched.output(tokens, codes)
        # A slot may have another request by now, which this step's result is nothing to.
        here = self._rows.request[launched.all_slots] == launched.requests
        good &= here[launched.rows]
        for drawn, has_token in zip(tokens, good, strict=True):
            self._rows.sampled(launched.slots[has_token], drawn[has_token])
        self._failed.learn(launched.all_slots.tolist(), [(row, why) for row, why in output.errors if here[row]])
        return output
