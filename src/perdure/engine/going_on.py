"""What a request goes on from whose replica was lost: what is known of it, as a checkpoint."""

from __future__ import annotations

from array import array

from msgspec.structs import replace

from perdure.api.checkpoint import Checkpoint, Sample
from perdure.api.request import Request
from perdure.api.sampling import SamplingParams
from perdure.api.scores import PackedScores
from perdure.coordinator import messages as m


def going_on(request: Request, known: m.Known, past: Checkpoint | None) -> Checkpoint:
    """The checkpoint of a request of which this is known. past: what it was submitted as. A sample that was lost before
    all was told that it had then is again what it was."""
    told = _as_told(request, known)
    if past is None or not past.num_output:
        return told
    is_same = past.fingerprint == told.fingerprint
    samples = tuple(
        replace(had, exact=had.exact and is_same) if had.ending or had.num_output > one.num_output else one
        for had, one in zip(past.samples, told.samples, strict=True)
    )
    if all(sample.ending is not None for sample in samples):
        return told  # who ended before has to be told of: it begins anew
    return replace(told, samples=samples, prompt_scores=past.prompt_scores)


def _as_told(request: Request, known: m.Known) -> Checkpoint:
    """Its scores so far are zeros: the client has them."""
    params = request.params
    samples = [*known.samples, *[m.KnownSample()] * (params.n - len(known.samples))]
    has_output = any(sample.token_ids for sample in samples)
    num_scored = len(request.prompt_token_ids) - 1 if has_output else 0
    return Checkpoint(
        request_id=request.request_id,
        status="running",
        params=params,
        prompt=None,
        prompt_tokens=array("i", request.prompt_token_ids).tobytes(),
        max_output=known.max_output,
        seed=known.seed,
        logprobs_mode=known.logprobs_mode,
        samples=tuple(_sample(sample, params) for sample in samples),
        prompt_scores=None if params.prompt_logprobs is None else _zeros(num_scored, 0),
        fingerprint=known.fingerprint,
        num_cached_tokens=0,
        num_checkpoints=known.num_moves,
        cache_salt=request.cache_salt,
    )


def _sample(known: m.KnownSample, params: SamplingParams) -> Sample:
    count = len(known.token_ids)
    return Sample(
        tokens=array("i", known.token_ids).tobytes(),
        scores=_zeros(count, count * len(params.logprob_token_ids or ())) if params.asks_scores else None,
        exact=known.exact,
        epochs=tuple(known.epochs),
        ending=known.ending,
    )


def _zeros(num_scored: int, num_listed: int) -> PackedScores:
    column, listed = bytes(4 * num_scored), bytes(4 * num_listed)
    return PackedScores(column, column, column, b"", b"", listed, listed)
