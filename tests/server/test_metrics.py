"""What is counted and traced of requests, whoever waits for their ends; and that the dashboard shows what there is."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from perdure import InvalidValue, StateError
from perdure.api.output import Replicas, ReplicaStatus
from perdure.server import operations
from perdure.server.tracing import Tracing
from tests.server.conftest import Running, running
from tests.server.started import ENDLESS, PATH

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
ENDINGS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


@pytest.fixture(scope="module")
def own(tiny: Path) -> Iterator[Running]:
    with running(tiny, {"served_model_name": "tiny"}, num_pages=128) as server:
        yield server
        server.check_empty()


def counted(server: Running, name: str) -> float:
    found = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def test_the_dashboard_asks_for_what_there_is(own: Running) -> None:
    told = own.http.get("/metrics").text
    exported = {
        name + ending
        for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", told, re.MULTILINE)
        for ending in ENDINGS[kind]
    }
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in board["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"\b(?:vllm|perdure):\w+", query)}
    assert asked and asked <= exported, asked - exported
    ours = {name for name in exported if name.startswith("perdure:") and not name.endswith("_created")}
    assert ours <= asked, ours - asked  # what no other dashboard knows is shown here
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_an_abort_with_tokens_is_counted_though_its_client_went(own: Running) -> None:
    before = counted(own, "perdure:aborted_with_partial_total")
    with own.http.stream("POST", PATH, json={**ENDLESS, "prompt": "a", "stream": True}) as answer:
        next(answer.iter_lines())
    own.check_empty()
    assert counted(own, "perdure:aborted_with_partial_total") == before + 1


def test_nan_is_counted_and_so_are_weights(own: Running, tiny: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny, tmp_path / "broken")
    (file,) = broken.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    save_file(tensors, file, {"format": "pt"})
    own.told("/weights", weights=str(broken), epoch=5)
    assert own.refused(PATH, 500, prompt="a", max_tokens=2)["type"] == "server_error"
    assert counted(own, "perdure:nan_scores_total") == counted(own, "perdure:requests_failed_total") == 1
    assert counted(own, "perdure:weight_epoch") == 5
    own.told("/weights", weights=str(tiny), epoch=6)
    own.told(PATH, prompt="a", max_tokens=2)
    assert counted(own, "perdure:nan_scores_total") == 1


@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_a_coordinator_that_is_away_makes_it_unready_and_not_dead(
    how: str, own: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is over is known to be; a coordinator that was killed says nothing, and nobody waits for it."""
    before = counted(own, "vllm:generation_tokens_total")

    async def away() -> None:
        if how == "is silent":
            await asyncio.Event().wait()
        raise StateError("there is no coordinator now")

    monkeypatch.setattr(operations, "PATIENCE_S", 0.05)
    monkeypatch.setattr(operations, "SCRAPE_S", 0.05)
    for asked in ("stats", "replicas"):
        monkeypatch.setattr(own.server.front.llm, asked, away)
    ready = own.http.get("/ready")
    assert (ready.status_code, ready.json()["state"]) == (503, "no coordinator")
    assert own.http.get("/health").status_code == 200
    assert counted(own, "vllm:generation_tokens_total") == before


def test_it_is_unready_while_no_replica_serves(own: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost() -> Replicas:
        return Replicas([ReplicaStatus(0, "lost", 0, 1.0)], {})

    monkeypatch.setattr(own.server.front.llm, "replicas", lost)
    ready = own.http.get("/ready")
    assert (ready.status_code, ready.json()["state"]) == (503, "no replica")


def test_without_the_package_an_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidValue, match=r"perdure\[otel\]"):
        Tracing.to("http://127.0.0.1:1/v1/traces", "tiny")


def test_a_request_is_a_span_with_its_events(own: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="perdure[otel] is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(own.server.front, "tracing", Tracing(provider, "tiny"))
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    body = {"max_tokens": 3, "ignore_eos": True, "request_id": "r"}
    begun = time.time_ns()
    for stream in (False, True):
        own.http.post(PATH, json={**body, "prompt": ["ab", "c"], "stream": stream}, headers=parent).raise_for_status()
    own.refused(PATH, prompt=[], request_id="none")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(own.told, PATH, prompt="a", **{**ENDLESS, "request_id": "gone"})
        own.wait_until(lambda stats: stats["num_generated_tokens"] > 20)
        own.post("/abort", request_ids="gone")
        call.result()
    spans: dict[str, list[Any]] = {}
    for span in memory.get_finished_spans():
        spans.setdefault(span.attributes["gen_ai.request.id"], []).append(span)
    assert sorted(spans) == ["gone", "none", "r-0", "r-1"] and [len(spans[name]) for name in ("r-0", "r-1")] == [2, 2]
    for span in spans["r-0"] + spans["r-1"]:
        assert span.parent.span_id == 0xB7AD6B7169203331 and span.status.is_ok
        assert span.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
        kinds = [event.name for event in span.events]
        assert kinds[0] == "queued" and kinds[-1] == "ended" and {"scheduled", "first_token"} <= set(kinds)
        times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
        assert begun - 10**9 <= times[0] and sorted(times) == times
        assert (
            span.attributes["gen_ai.usage.completion_tokens"] == 3 and span.attributes["gen_ai.request.max_tokens"] == 3
        )
    assert not spans["none"][0].status.is_ok and "InvalidValue" in spans["none"][0].status.description
    assert spans["gone"][0].parent is None and spans["gone"][0].attributes["gen_ai.response.finish_reasons"] == (
        "abort",
    )
