"""OpenTelemetry: a span for each request of the engine, with what happened to it on its way as events.

It is made when the request has ended, of what its result knows; so it costs nothing on the way, and one whose client
went has its span, too. A caller's `traceparent` is its parent. The package is an extra: `perdure[otel]`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from perdure import InvalidValue, RequestOutput, SamplingParams, __version__

_CARRIED = ("temperature", "top_p", "top_k", "max_tokens", "n", "seed")
"""Settings that a span tells."""


class Tracing:
    """provider: an OpenTelemetry `TracerProvider`. Raises `InvalidValue` where the package is missing."""

    def __init__(self, provider: Any, model: str) -> None:
        self._provider = provider
        self._model = model
        self._tracer = provider.get_tracer("perdure", __version__)

    @classmethod
    def to(cls, endpoint: str, model: str) -> Self:
        """Spans go there, by OTLP over HTTP. Names of the service, sampling and headers are OpenTelemetry's own
        environment variables."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise InvalidValue(
                f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry: pip install 'perdure[otel]'"
            ) from None
        resource = Resource({SERVICE_NAME: "perdure"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider, model)

    @contextmanager
    def entered(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Whatever begins here has the caller's span as its parent."""
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        token = context.attach(TraceContextTextMapPropagator().extract(headers))
        try:
            yield
        finally:
            context.detach(token)

    def ended(
        self, request_id: str, num_prompt_tokens: int, params: SamplingParams, result: RequestOutput | BaseException
    ) -> None:
        """Its span. Called in the context in which it began."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        to_wall_ns = time.time_ns() - time.monotonic_ns()

        def wall_ns(seconds: float) -> int:
            return int(seconds * 1e9) + to_wall_ns

        metrics = result.metrics if isinstance(result, RequestOutput) else None
        begun = time.monotonic() if metrics is None else metrics.arrival_time
        end = begun if metrics is None else metrics.finished_time
        attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.usage.prompt_tokens": num_prompt_tokens,
            **{f"gen_ai.request.{name}": getattr(params, name) for name in _CARRIED},
        }
        span = self._tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            start_time=wall_ns(begun),
            attributes={name: value for name, value in attributes.items() if value is not None},
        )
        error: BaseException | None
        if isinstance(result, RequestOutput):
            error = result.error
            span.set_attributes(_outcome(result))
        else:
            error = result
        for event in () if metrics is None else metrics.events:
            span.add_event(event.kind, {"num_tokens": event.num_tokens, "sample": event.child}, wall_ns(event.time))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        span.end(wall_ns(begun if end is None else end))

    def close(self) -> None:
        """Send what is left. It may take seconds."""
        self._provider.shutdown()


def _outcome(result: RequestOutput) -> dict[str, Any]:
    told: dict[str, Any] = {
        "gen_ai.usage.completion_tokens": sum(len(output.token_ids) for output in result.outputs),
        "gen_ai.response.finish_reasons": [str(output.finish_reason) for output in result.outputs],
        "perdure.cached_tokens": result.num_cached_tokens,
        "perdure.exact": result.exact,
    }
    metrics = result.metrics
    if metrics is not None and metrics.time_in_queue is not None:
        told["gen_ai.latency.time_in_queue"] = metrics.time_in_queue
    if metrics is not None and metrics.first_token_time is not None:
        told["gen_ai.latency.time_to_first_token"] = metrics.first_token_time - metrics.arrival_time
    return told
