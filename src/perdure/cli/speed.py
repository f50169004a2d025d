"""How fast results came, in words."""

from __future__ import annotations

from collections.abc import Sequence

from perdure import RequestOutput


def speed_of(results: Sequence[RequestOutput]) -> str:
    """Tokens in and out. The rate is of the tokens after the first, over all requests and samples together."""
    num_prompt = sum(len(one.prompt_token_ids or []) for one in results)
    num_new = sum(len(sample.token_ids) for one in results for sample in one.outputs)
    num_cached = sum(one.num_cached_tokens for one in results)
    words = [f"{num_prompt} prompt tokens" + (f" ({num_cached} cached)" if num_cached else ""), f"{num_new} new tokens"]
    times = [one.metrics for one in results if one.metrics is not None]
    starts = [one.first_token_time for one in times if one.first_token_time is not None]
    ends = [one.finished_time for one in times if one.finished_time is not None]
    if starts and ends:
        seconds = max(ends) - min(starts)
        if num_new > 1 and seconds > 0:
            words.append(f"{(num_new - 1) / seconds:.1f} tokens/s")
        words.append(f"first token after {min(starts) - min(one.arrival_time for one in times):.2f} s")
    return ", ".join(words)
