"""The field policy: what a checkpoint, the wire and a result do with every field of a request's values.

Plain data. A field that is added to one of these classes needs a line here, and tests/core/test_fields.py holds the
lines against what really happens. `docs/fields.md` is made from this table.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Policy(NamedTuple):
    """checkpoint: "kept" goes on as it was; "anew" begins again where the request goes on; "made" is made from others.
    "no": not of this value, or of whoever submits.

    wire: whether it crosses processes, in a command, an event or a file. "no": it is made again on the other side.
    result: fields of `RequestOutput` that show it; for a field of a result, where it comes from.
    """

    checkpoint: Literal["kept", "anew", "made", "no"]
    wire: Literal["sent", "no"]
    result: str = ""


FIELDS: dict[str, dict[str, Policy]] = {
    "Request": {
        "request_id": Policy("kept", "sent", "request_id"),  # unless another is given
        "ticket": Policy("no", "sent"),
        "prompt_token_ids": Policy("kept", "sent", "prompt_token_ids"),  # only if return_prompt
        "params": Policy("kept", "sent"),
        "prompt": Policy("kept", "sent", "prompt"),  # only if return_prompt
        "stream": Policy("no", "sent"),
        "cache_salt": Policy("kept", "sent"),
        "routed": Policy("no", "sent"),
        "is_closed": Policy("no", "sent"),
    },
    "SamplingParams": {
        "n": Policy("kept", "sent", "outputs.index"),
        "max_tokens": Policy("kept", "sent"),
        "min_tokens": Policy("kept", "sent"),
        "temperature": Policy("kept", "sent"),
        "top_k": Policy("kept", "sent"),
        "top_p": Policy("kept", "sent"),
        "min_p": Policy("kept", "sent"),
        "repetition_penalty": Policy("kept", "sent"),
        "presence_penalty": Policy("kept", "sent"),
        "frequency_penalty": Policy("kept", "sent"),
        "logit_bias": Policy("kept", "sent"),
        "allowed_token_ids": Policy("kept", "sent"),
        "bad_words": Policy("kept", "sent"),  # as ids, once submitted
        "logits_processors": Policy("kept", "sent"),  # by name; a request with others gives no checkpoint
        "seed": Policy("kept", "sent"),
        "stop": Policy("kept", "sent", "outputs.stop_reason"),
        "stop_token_ids": Policy("kept", "sent", "outputs.stop_reason"),
        "stop_token_sequences": Policy("kept", "sent", "outputs.stop_reason"),
        "ignore_eos": Policy("kept", "sent"),
        "strip_stop_tokens": Policy("kept", "sent"),
        "include_stop_str_in_output": Policy("kept", "sent"),
        "logprobs": Policy("kept", "sent"),
        "prompt_logprobs": Policy("kept", "sent"),
        "logprobs_mode": Policy("kept", "sent"),
        "logprob_token_ids": Policy("kept", "sent", "outputs.logprobs"),
        "forced_token_ids": Policy("kept", "sent", "outputs.token_ids"),
        "structured_outputs": Policy("kept", "sent"),  # compiled again where it goes on
        "detokenize": Policy("kept", "sent"),
        "skip_special_tokens": Policy("kept", "sent"),
        "return_prompt": Policy("kept", "sent"),
        "output_kind": Policy("kept", "sent"),
        "stream_interval": Policy("kept", "sent"),
        "priority": Policy("kept", "sent"),
        "skip_reading_prefix_cache": Policy("kept", "sent"),
    },
    "Group": {
        "request": Policy("made", "no"),
        "seed": Policy("kept", "no"),
        "logprobs_mode": Policy("kept", "no"),
        "waits_for": Policy("anew", "no"),
        "prompt_scores": Policy("kept", "no", "prompt_logprobs"),
        "has_old_scores": Policy("made", "no"),  # whether tokens were drawn after them
        "num_cached": Policy("kept", "no", "num_cached_tokens"),
        "num_checkpoints": Policy("made", "no", "metrics.num_checkpoints"),  # one more
        "num_residencies": Policy("anew", "no"),
        "children": Policy("made", "no", "outputs.index"),  # of the samples
        "num_left": Policy("made", "no"),
        "residents": Policy("anew", "no"),
        "held": Policy("anew", "no"),
    },
    "RequestState": {
        "request": Policy("made", "no"),
        "group": Policy("made", "no"),
        "child": Policy("made", "no", "outputs.index"),  # by its place among the samples
        "arrival": Policy("anew", "no"),
        "order": Policy("made", "no"),  # of the priority, which is kept, and the arrival
        "stops": Policy("made", "no"),  # of the settings and the budget, which is kept
        "prompt_length": Policy("made", "no"),
        "last_position": Policy("made", "no"),
        "needs_host": Policy("made", "no"),
        "may_burst": Policy("made", "no"),
        "status": Policy("anew", "no"),
        "ending": Policy("kept", "no", "outputs.finish_reason, outputs.stop_reason, error"),
        "tokens": Policy("kept", "no", "outputs.token_ids"),
        "scores": Policy("kept", "no", "outputs.logprobs"),
        "in_flight": Policy("anew", "no"),
        "in_flight_tokens": Policy("anew", "no"),
        "num_pauses": Policy("kept", "no", "metrics.num_pauses"),
        "num_evictions": Policy("kept", "no", "metrics.num_evictions"),
        "epochs": Policy("kept", "no", "outputs.weight_epochs"),
        "paused_at": Policy("anew", "no"),
        "replay": Policy("anew", "no"),
        "exact": Policy("kept", "no", "exact"),  # and False if the fingerprints are unequal
        "tried_at": Policy("anew", "no"),
        "awaits": Policy("anew", "no"),
        "slot": Policy("anew", "no"),
        "pages": Policy("anew", "no"),
        "nodes": Policy("anew", "no"),
        "num_planned": Policy("anew", "no"),
        "num_computed": Policy("anew", "no"),
        "num_copied": Policy("anew", "no"),
        "prefill_end": Policy("anew", "no"),
    },
    "Checkpoint": {
        "request_id": Policy("kept", "sent", "request_id"),
        "status": Policy("anew", "sent"),  # it says where the checkpoint was taken
        "params": Policy("kept", "sent"),
        "prompt": Policy("kept", "sent", "prompt"),
        "prompt_tokens": Policy("kept", "sent", "prompt_token_ids"),
        "max_output": Policy("kept", "sent"),
        "seed": Policy("kept", "sent"),
        "logprobs_mode": Policy("kept", "sent"),
        "samples": Policy("kept", "sent", "outputs.index"),
        "prompt_scores": Policy("kept", "sent", "prompt_logprobs"),
        "fingerprint": Policy("anew", "sent"),  # of the engine that takes it
        "num_cached_tokens": Policy("kept", "sent", "num_cached_tokens"),
        "num_checkpoints": Policy("made", "sent", "metrics.num_checkpoints"),
        "timing": Policy("kept", "sent", "metrics.arrival_time, metrics.events"),
        "cache_salt": Policy("kept", "sent"),
    },
    "Sample": {
        "tokens": Policy("kept", "sent", "outputs.token_ids"),
        "scores": Policy("kept", "sent", "outputs.logprobs"),
        "exact": Policy("kept", "sent", "exact"),
        "num_pauses": Policy("kept", "sent", "metrics.num_pauses"),
        "num_evictions": Policy("kept", "sent", "metrics.num_evictions"),
        "epochs": Policy("kept", "sent", "outputs.weight_epochs"),
        "ending": Policy("kept", "sent", "outputs.finish_reason, outputs.stop_reason, error"),  # told again
    },
    "Record": {
        "request_id": Policy("no", "no", "request_id"),
        "arrival": Policy("no", "no"),
        "seed": Policy("no", "no"),
        "prompt_token_ids": Policy("no", "no", "prompt_token_ids"),
        "token_ids": Policy("no", "no", "outputs.token_ids, outputs.text"),
        "finish_reason": Policy("no", "no", "outputs.finish_reason"),
        "stop": Policy("no", "no", "outputs.stop_reason, outputs.text"),
        "scores": Policy("no", "no", "outputs.logprobs"),
        "prompt_scores": Policy("no", "no", "prompt_logprobs"),
        "exact": Policy("no", "no", "exact"),
        "num_cached_tokens": Policy("no", "no", "num_cached_tokens"),
        "num_pauses": Policy("no", "no", "metrics.num_pauses"),
        "num_evictions": Policy("no", "no", "metrics.num_evictions"),
        "num_checkpoints": Policy("no", "no", "metrics.num_checkpoints"),
        "weight_epochs": Policy("no", "no", "outputs.weight_epochs"),
        "failure": Policy("no", "no", "error"),
        "child": Policy("no", "no", "outputs.index"),
    },
    "RequestOutput": {
        "request_id": Policy("no", "no", "Record.request_id"),
        "outputs": Policy("no", "no", "`n` of them"),
        "finished": Policy("no", "no", "True but in streamed parts"),
        "prompt": Policy("no", "no", "Request.prompt, or the text of its ids; if return_prompt"),
        "prompt_token_ids": Policy("no", "no", "Record.prompt_token_ids; if return_prompt"),
        "prompt_logprobs": Policy("no", "no", "Record.prompt_scores"),
        "num_cached_tokens": Policy("no", "no", "Record.num_cached_tokens"),
        "exact": Policy("no", "no", "Record.exact"),
        "metrics": Policy("no", "no", "the request's receiver"),
        "error": Policy("no", "no", "Record.failure"),
    },
    "CompletionOutput": {
        "index": Policy("no", "no", "Record.child"),
        "text": Policy("no", "no", "one decode of Record.token_ids, cut at the stop"),
        "token_ids": Policy("no", "no", "Record.token_ids, less the stop if strip_stop_tokens"),
        "logprobs": Policy("no", "no", "Record.scores, as many as token_ids"),
        "finish_reason": Policy("no", "no", "Record.finish_reason"),
        "stop_reason": Policy("no", "no", "Record.stop"),
        "weight_epochs": Policy("no", "no", "Record.weight_epochs, as far as token_ids go"),
    },
    "RequestMetrics": {
        "arrival_time": Policy("no", "no", "the clock when it was submitted"),
        "events": Policy("no", "no", "moments, with the loop's time"),
        "num_pauses": Policy("no", "no", "Record.num_pauses"),
        "num_evictions": Policy("no", "no", "Record.num_evictions"),
        "num_checkpoints": Policy("no", "no", "Record.num_checkpoints"),
    },
}


def table(name: str) -> str:
    """One class's lines as a Markdown table."""
    lines = [f"## {name}", "", "| field | checkpoint | wire | result |", "|---|---|---|---|"]
    lines += [f"| `{field}` | {p.checkpoint} | {p.wire} | {p.result} |" for field, p in FIELDS[name].items()]
    return "\n".join(lines)
