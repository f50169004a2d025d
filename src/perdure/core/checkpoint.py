"""Checkpoints: a live request given out as a plain value, and a request that goes on from one.

- A checkpoint is a mark in the request's committed tokens. What is in flight is not in it and comes again elsewhere:
  a draw depends on (seed, output position) only. So it can be taken at any time, in any status, and nobody notices.
- Nothing is resolved again: seed, budget and kind of scores go with the request. Where they do not fit it is refused.
- All that is on a device starts anew, as after an eviction; nothing recorded is asked for again.
"""

from __future__ import annotations

from array import array
from typing import Literal, cast

from perdure.api.checkpoint import Checkpoint
from perdure.api.config import CoreConfig
from perdure.api.errors import InvalidValue
from perdure.api.fingerprint import Fingerprint
from perdure.api.request import Request
from perdure.api.sampling import HELD
from perdure.api.scores import TokenScores
from perdure.core.admission import check_ids, stop_rule
from perdure.core.state import RequestState
from perdure.core.stopping import CursorFactory


def take(state: RequestState, fingerprint: Fingerprint) -> Checkpoint:
    """The request as it is now. Everything in it is a copy. Raises `InvalidValue` for one that cannot go elsewhere."""
    request = state.request
    if any(name.startswith(HELD) for name in request.params.logits_processors):
        raise InvalidValue("logits_processors holds functions of this process: only 'module:function' goes elsewhere")
    return Checkpoint(
        request_id=request.request_id,
        status=cast(Literal["waiting", "running", "paused"], state.status.value),
        params=request.params,
        prompt=request.prompt,
        prompt_length=state.prompt_length,
        max_output=state.stops.max_output,
        seed=state.seed,
        logprobs_mode=state.logprobs_mode,
        tokens=array("i", state.tokens).tobytes(),
        scores=None if state.scores is None else state.scores.pack(),
        prompt_scores=None if state.prompt_scores is None else state.prompt_scores.pack(),
        fingerprint=fingerprint,
        exact=state.exact,
        num_cached_tokens=state.num_cached,
        num_pauses=state.num_pauses,
        num_evictions=state.num_evictions,
        num_checkpoints=state.num_checkpoints + 1,
        epochs=tuple(state.epochs),
        cache_salt=request.cache_salt,
    )


def readmit(
    request: Request,
    checkpoint: Checkpoint,
    arrival: int,
    fingerprint: Fingerprint,
    config: CoreConfig,
    make_cursor: CursorFactory,
) -> RequestState:
    """The request that goes on from a checkpoint, waiting. Raises `InvalidValue`.

    request: only who submits it counts, and under which id. fingerprint: of the engine as it is now.
    """
    request = checkpoint.as_request(request.request_id, request.ticket, request.stream)
    _check_fits(checkpoint, config)
    is_same = checkpoint.fingerprint == fingerprint
    if not is_same and checkpoint.num_output and config.on_mismatch == "refuse":
        differences = checkpoint.fingerprint.differences(fingerprint)
        raise InvalidValue(f"the checkpoint comes from another kind of engine, and on_mismatch='refuse': {differences}")
    output = checkpoint.token_ids
    check_ids("token_ids", output, config.vocab_size)
    stops = stop_rule(request, checkpoint.max_output, config, make_cursor)
    stops.pass_over(output)
    state = RequestState(request, arrival, checkpoint.seed, checkpoint.logprobs_mode, stops)
    if checkpoint.scores is not None:
        state.scores = TokenScores.unpack(checkpoint.scores, output, listed_ids=request.params.logprob_token_ids)
    if checkpoint.prompt_scores is not None and (is_same or output):  # else they are made anew, all of one kind
        scored = state.tokens[1 : 1 + checkpoint.prompt_scores.num_scored]
        state.prompt_scores = TokenScores.unpack(checkpoint.prompt_scores, scored, leading_none=True)
    state.tokens += output
    state.exact = checkpoint.exact and (is_same or not output)
    state.epochs = list(checkpoint.epochs)
    state.num_cached = checkpoint.num_cached_tokens
    state.num_pauses = checkpoint.num_pauses
    state.num_evictions = checkpoint.num_evictions
    state.num_checkpoints = checkpoint.num_checkpoints
    return state


def _check_fits(checkpoint: Checkpoint, config: CoreConfig) -> None:
    longest = checkpoint.prompt_length + checkpoint.max_output
    if longest > config.max_num_tokens:
        raise InvalidValue(
            f"the checkpoint's request may grow to {longest} tokens, this engine has room for {config.max_num_tokens} "
            f"(max_model_len={config.max_model_len}, num_pages={config.num_pages} of page_size={config.page_size})"
        )
