"""What Prometheus reads: vLLM's names where it has one, which dashboards know, and `perdure:` for the rest.

Counts of the engine come from its `Stats` when somebody asks; times of requests are observed as these end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from perdure import BadLogits, RequestOutput, SamplingParams
from perdure.api.output import RequestMetrics, Stats

STATES = ("running", "paused", "suspended", "stopped")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_SAMPLES = (1, 2, 5, 10, 20, 50, 100)

_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("vllm:num_requests_running", "Requests that have pages and run.", "num_running"),
    ("vllm:num_requests_waiting", "Requests that wait to begin.", "num_waiting"),
    ("perdure:num_requests_paused", "Requests that wait for a page, keeping those they have.", "num_paused"),
    ("perdure:num_free_pages", "Pages of the KV pool that nobody holds.", "num_free_pages"),
    ("perdure:num_pinned_pages", "Pages held for pinned prefixes.", "num_pinned_pages"),
    ("perdure:weight_epoch", "The number of the weights in use.", "weight_epoch"),
)
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", "num_prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "num_generated_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens that were looked for in the prefix cache.", "num_prompt_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens that were found there.", "num_cached_tokens"),
    ("vllm:num_preemptions", "Requests evicted, to be computed again.", "num_evictions"),
    ("perdure:num_pauses", "Times a request waited for a page, keeping those it had.", "num_pauses"),
    ("perdure:num_steps", "Steps of the engine.", "num_steps"),
)


class Metrics:
    """Of one front end. folder: where those of several lie, this one's among them; prometheus_client must know it
    when it is loaded (`supervisor`)."""

    def __init__(self, model: str, description: Mapping[str, Any], folder: str | None = None) -> None:
        self._registry = CollectorRegistry()
        self._shown = self._registry
        if folder is not None:
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown, folder)  # type: ignore[no-untyped-call]
        self._engine = _EngineCounts(model)
        self._shown.register(self._engine)
        labels = {"model_name": model}

        def histogram(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, words, list(labels), buckets=buckets, registry=self._registry).labels(**labels)

        def counter(name: str, words: str, *others: str) -> Counter:
            return Counter(name, words, [*labels, *others], registry=self._registry)

        self._first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._between = histogram("vllm:inter_token_latency_seconds", "Mean time between a request's tokens.", _SECONDS)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "From arrival to the first pages.", _SECONDS)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From the first pages to a token.", _SECONDS)
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first token to the end.", _SECONDS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output = histogram("vllm:request_generation_tokens", "Tokens of an output.", _TOKENS)
        self._samples = histogram("vllm:request_params_n", "Samples asked of a prompt.", _SAMPLES)
        self._ended = counter("vllm:request_success", "Outputs, by what ended them.", "finished_reason")
        self._partial = counter("perdure:aborted_with_partial", "Outputs that were aborted after some tokens.")
        self._refused = counter("perdure:requests_refused", "Requests that never began, by error.", "error")
        self._failed = counter("perdure:requests_failed", "Requests that began and failed, by error.", "error")
        self._nan = counter("perdure:nan_scores", "Requests that failed since logits held NaN, or nothing finite.")
        self._labels = labels
        for one in (self._partial, self._nan):
            one.labels(**labels)  # they are there from the start, as 0
        settings = {name: str(description[name]) for name in ("num_pages", "page_size") if name in description}
        info = {**labels, "num_gpu_blocks": settings.get("num_pages", ""), "block_size": settings.get("page_size", "")}
        Gauge(
            "vllm:cache_config_info", "The KV pool.", list(info), registry=self._registry, multiprocess_mode="max"
        ).labels(**info).set(1)

    def ended(self, num_prompt_tokens: int, params: SamplingParams, result: RequestOutput | BaseException) -> None:
        """One request of the engine is over."""
        if not isinstance(result, RequestOutput):
            self._refused.labels(**self._labels, error=type(result).__name__).inc()
            return
        if result.error is not None:
            self._failed.labels(**self._labels, error=type(result.error).__name__).inc()
            if isinstance(result.error, BadLogits):
                self._nan.labels(**self._labels).inc()
        for output in result.outputs:
            self._output_ended(len(output.token_ids), output.finish_reason or "error")
        self._prompt.observe(num_prompt_tokens)
        self._samples.observe(params.n)
        if result.metrics is not None:
            self._observe_times(result.metrics)

    def _output_ended(self, num_tokens: int, reason: str) -> None:
        self._ended.labels(**self._labels, finished_reason=reason).inc()
        self._output.observe(num_tokens)
        if reason == "abort" and num_tokens:
            self._partial.labels(**self._labels).inc()

    def _observe_times(self, metrics: RequestMetrics) -> None:
        arrival, scheduled = metrics.arrival_time, metrics.first_scheduled_time
        first, end = metrics.first_token_time, metrics.finished_time
        if end is not None:
            self._whole.observe(end - arrival)
        if scheduled is not None:
            self._queue.observe(scheduled - arrival)
        if first is None:
            return
        self._first_token.observe(first - arrival)
        if scheduled is not None:
            self._prefill.observe(first - scheduled)
        if end is not None:
            self._decode.observe(end - first)
            most = max((event.num_tokens for event in metrics.events if event.kind == "ended"), default=0)
            if most > 1:
                self._between.observe((end - first) / (most - 1))

    def text(self, stats: Stats | None) -> bytes:
        """stats: None = as they were before."""
        if stats is not None:
            self._engine.stats = stats
        return generate_latest(self._shown)


class _EngineCounts:
    """The engine's own, as of the last `Stats`."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.stats: Stats | None = None

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        if stats is None:
            return
        for name, words, field in _GAUGES:
            yield self._gauge(name, words, getattr(stats, field))
        used = 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Part of the KV pool that is in use; 1 = all of it.", used)
        state = GaugeMetricFamily("perdure:state", "1 for the engine's state.", labels=["model_name", "state"])
        for one in STATES:
            state.add_metric([self._model, one], float(stats.state == one))
        yield state
        for name, words, field in _COUNTERS:
            counter = CounterMetricFamily(name, words, labels=["model_name"])
            counter.add_metric([self._model], getattr(stats, field))
            yield counter

    def _gauge(self, name: str, words: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, words, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge
