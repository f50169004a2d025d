"""Checkpoints: a live request given out as a plain value, and a request that goes on from one.

- A checkpoint is a mark in the request's committed tokens. What is in flight is not in it and comes again elsewhere:
  a draw depends on (seed, child, output position) only. So it can be taken at any time, in any status, unnoticed.
- It holds the whole group; children that have ended stay ended, and are told of again where it goes on.
- Nothing is resolved again: seed, budget and kind of scores go with the request. Where they do not fit it is refused.
- All that is on a device starts anew, as after an eviction; nothing recorded is asked for again.
"""

from __future__ import annotations

from array import array
from typing import Literal

from perdure.api.checkpoint import Checkpoint, Sample
from perdure.api.config import CoreConfig
from perdure.api.errors import InvalidValue
from perdure.api.fingerprint import Fingerprint
from perdure.api.request import Request
from perdure.api.sampling import HELD
from perdure.api.scores import TokenScores
from perdure.core.admission import check_ids, stop_rules
from perdure.core.group import Group
from perdure.core.lifecycle import Status
from perdure.core.state import RequestState
from perdure.core.stopping import CursorFactory


def take(group: Group, fingerprint: Fingerprint) -> Checkpoint:
    """The request as it is now. Everything in it is a copy. Raises `InvalidValue` for one that cannot go elsewhere."""
    request, prompt_scores = group.request, group.prompt_scores
    if any(name.startswith(HELD) for name in request.params.logits_processors):
        raise InvalidValue("logits_processors holds functions of this process: only 'module:function' goes elsewhere")
    return Checkpoint(
        request_id=request.request_id,
        status=_furthest(group),
        params=request.params,
        prompt=request.prompt,
        prompt_tokens=array("i", request.prompt_token_ids).tobytes(),
        max_output=group.children[0].stops.max_output,
        seed=group.seed,
        logprobs_mode=group.logprobs_mode,
        samples=tuple(_sample(child) for child in group.children),
        prompt_scores=None if prompt_scores is None else prompt_scores.pack(),
        fingerprint=fingerprint,
        num_cached_tokens=group.num_cached,
        num_checkpoints=group.num_checkpoints + 1,
        cache_salt=request.cache_salt,
    )


def _sample(state: RequestState) -> Sample:
    return Sample(
        tokens=array("i", state.tokens[state.prompt_length :]).tobytes(),
        scores=None if state.scores is None else state.scores.pack(),
        exact=state.exact,
        num_pauses=state.num_pauses,
        num_evictions=state.num_evictions,
        epochs=tuple(state.epochs),
        ending=state.ending,
    )


def _furthest(group: Group) -> Literal["waiting", "running", "paused"]:
    found = {child.status for child in group.children}
    return "running" if Status.RUNNING in found else "paused" if Status.PAUSED in found else "waiting"


def readmit(
    request: Request,
    checkpoint: Checkpoint,
    arrival: int,
    fingerprint: Fingerprint,
    config: CoreConfig,
    make_cursor: CursorFactory,
) -> Group:
    """The request that goes on from a checkpoint, waiting; samples that have ended have their `ending`. Raises
    `InvalidValue`.

    request: only who submits it counts, and under which id. fingerprint: of the engine as it is now.
    """
    asked = request
    request = checkpoint.as_request(asked.request_id, asked.ticket, asked.stream, asked.routed, asked.is_closed)
    _check_fits(checkpoint, config)
    is_same = checkpoint.fingerprint == fingerprint
    if not is_same and checkpoint.num_output and config.on_mismatch == "refuse":
        differences = checkpoint.fingerprint.differences(fingerprint)
        raise InvalidValue(f"the checkpoint comes from another kind of engine, and on_mismatch='refuse': {differences}")
    for sample in checkpoint.samples:
        check_ids("token_ids", sample.token_ids, config.vocab_size)
    stops = stop_rules(request, checkpoint.max_output, config, make_cursor)
    group = Group(request, checkpoint.seed, checkpoint.logprobs_mode)
    if checkpoint.prompt_scores is not None and (is_same or checkpoint.num_output):  # else made anew, all of one kind
        scored = request.prompt_token_ids[1 : 1 + checkpoint.prompt_scores.num_scored]
        group.prompt_scores = TokenScores.unpack(checkpoint.prompt_scores, scored, leading_none=True)
        group.has_old_scores = checkpoint.num_output > 0
    group.num_cached = checkpoint.num_cached_tokens
    group.num_checkpoints = checkpoint.num_checkpoints
    for sample, rule in zip(checkpoint.samples, stops, strict=True):
        _go_on(RequestState(group, arrival + len(group.children), rule), sample, is_same)
    return group


def _go_on(state: RequestState, sample: Sample, is_same: bool) -> None:
    """A new child has what its sample has. is_same: nothing is lost if other tokens follow."""
    output = sample.token_ids
    state.stops.pass_over(output)
    if sample.scores is not None:
        state.scores = TokenScores.unpack(sample.scores, output, listed_ids=state.request.params.logprob_token_ids)
    state.tokens += output
    state.exact = sample.exact and (is_same or not output or sample.ending is not None)
    state.epochs = list(sample.epochs)
    state.num_pauses = sample.num_pauses
    state.num_evictions = sample.num_evictions
    state.ending = sample.ending


def _check_fits(checkpoint: Checkpoint, config: CoreConfig) -> None:
    longest = checkpoint.prompt_length + checkpoint.max_output
    if longest > config.max_num_tokens:
        raise InvalidValue(
            f"the checkpoint's request may grow to {longest} tokens, this engine has room for {config.max_num_tokens} "
            f"(max_model_len={config.max_model_len}, num_pages={config.num_pages} of page_size={config.page_size})"
        )
