"""Requests drawn from the server's own description, and against it: none meets a fault of the server, every answer has
the form that is described, in a stream too, and a body that does not fit is refused."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings

from perdure import InvalidValue, SamplingParams
from perdure.server import openapi
from perdure.server.app import ENDPOINTS
from tests.server.conftest import Running, running
from tests.witness import witness

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install 'perdure[test]'")
of_openapi = importlib.import_module("schemathesis.specs.openapi.checks")

CHECKS = (
    schemathesis.checks.not_a_server_error,
    of_openapi.status_code_conformance,
    of_openapi.content_type_conformance,
    of_openapi.response_schema_conformance,
)
DRAWN = {"/v1/completions": 100, "/v1/chat/completions": 100, "/v1/responses": 100, "/tokenize": 60, "/detokenize": 50}
"""For one operation, so many that fit the description and so many that do not. All together are 1,500."""
OF_OTHERS = 16
BEGINS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions": {"max_tokens": 4},
    "/v1/responses": {"max_output_tokens": 4},
}
"""What a body has that names nothing else."""
STOP_IT = {"pause", "suspend", "sleep", "resume", "wake_up", "weights", "update_weights"}
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def drawn_at(tiny: Path) -> Iterator[Running]:
    serving = {"served_model_name": "tiny", "reasoning_parser": "think"}
    with running(tiny, serving, num_pages=128, max_model_len=512, check_integrity=True) as server:
        yield server
        server.check_empty()


def kept_small(body: Any) -> Any:
    """The same, with few tokens and samples, which cost time and show nothing here, and without a checkpoint, which
    nobody guesses. A whole number is an integer to JSON Schema, however it is written, but not to us."""
    if isinstance(body, float) and body.is_integer() and abs(body) < 2**63:
        return int(body)
    if isinstance(body, list):
        return [kept_small(one) for one in body]
    if not isinstance(body, dict):
        return body
    body = {name: kept_small(value) for name, value in body.items() if name != "checkpoint"}
    if isinstance(body.get("master_address"), str):  # a group of processes: nobody is there, and that shows at once
        body["master_address"] = "127.0.0.1"
        body["timeout_s"] = 0.01
    for name, most in (("max_tokens", 4), ("max_output_tokens", 4), ("max_completion_tokens", 4), ("n", 3)):
        if isinstance(body.get(name), int) and not isinstance(body[name], bool):
            body[name] = min(body[name], most)
    return body


def meets_nobody(body: dict[str, Any]) -> dict[str, Any]:
    """A group that is looked for on this machine only, for a moment, and that nobody joins."""
    own = {"master_address": "127.0.0.1", "master_port": 9, "rank": 1}
    body |= {name: value for name, value in own.items() if isinstance(body.get(name), type(value))}
    timeout_s = body.get("timeout_s", 1.0)
    return body | ({"timeout_s": 0.02} if isinstance(timeout_s, int | float) and timeout_s > 0.02 else {})


class Drawing:
    """Draws for one operation after the other, and counts what was answered."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._session = requests.Session()
        self.schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        self._described = self._session.get(f"{server.url}/openapi.json").json()
        self._validators: dict[str, jsonschema.Validator] = {}
        self.statuses: Counter[str] = Counter()
        self.num_events = 0

    def draw(self, operation: Any, mode: Any, count: int) -> None:
        told = self._described["paths"][operation.path][operation.method]
        takes = told.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
        generates, begins = operation.path in BEGINS, BEGINS.get(operation.path, {})

        @settings(
            max_examples=count,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            case.body = kept_small(case.body)
            if isinstance(case.body, dict):
                case.body = begins | case.body
                if operation.path == "/init_weight_group":
                    case.body = meets_nobody(case.body)
                if generates and "stream" not in case.body and self.statuses.total() % 2:
                    case.body["stream"] = True
            answer = case.call(session=self._session, timeout=60)
            self.statuses[str(answer.status_code)] += 1
            case.validate_response(answer, checks=CHECKS)
            if answer.status_code == 200 and takes is not None and isinstance(case.body, dict | list):
                self._validate(case.body, takes)
            if answer.headers.get("content-type", [""])[0].startswith("text/event-stream"):
                self._check_events(answer.text, told["responses"]["200"]["content"]["text/event-stream"]["x-data"])
            self._settle(operation.path)

        ask()

    def _validate(self, value: Any, schema: dict[str, Any]) -> None:
        name = json.dumps(schema) if "$ref" not in schema else schema["$ref"]
        if name not in self._validators:
            whole = {**schema, "components": self._described["components"]}
            self._validators[name] = jsonschema.Draft202012Validator(whole)
        self._validators[name].validate(value)

    def _check_events(self, text: str, schema: dict[str, Any]) -> None:
        error = {"$ref": "#/components/schemas/ErrorBody"}
        for line in text.splitlines():
            if line.startswith("data: {"):
                self.num_events += 1
                self._validate(json.loads(line.removeprefix("data: ")), {"anyOf": [schema, error]})

    def _settle(self, path: str) -> None:
        """Let it run again, with its weights."""
        server = self._server
        if path.removeprefix("/") not in STOP_IT:
            return
        if server.http.get("/state").json()["state"] != "running" and server.post("/resume").status_code != 200:
            server.told("/resume", tags=["weights"])
            server.told("/weights", weights=server.server.front.root)
            server.told("/resume")


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "request_id": "\u4e16"}, "request_id"),
    ("/v1/completions", {"prompt": "a", "request_id": "a\r\nb: c", "stream": True}, "request_id"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "request_id": " a"}, "request_id"),
    ("/v1/responses", {"input": "a", "request_id": "x" * 257}, "request_id"),
    ("/v1/responses", {"input": [{"type": "reasoning", "content": 5}]}, "input[0]"),
    ("/v1/responses", {"input": [{"type": "reasoning", "summary": {"a": 1}}]}, "input[0]"),
    ("/weights", {"weights": "x" * 5000}, "no such file"),
]


@pytest.mark.parametrize(("path", "body", "words"), FAULTS, ids=[f"{path}-{words}" for path, _, words in FAULTS])
def test_what_once_was_a_fault_is_refused(server: Running, path: str, body: dict[str, Any], words: str) -> None:
    assert words in server.refused(path, **body)["message"]


def test_the_limits_that_are_described_are_those_that_hold() -> None:
    described = json.loads(openapi.described(("tiny",), 512, ENDPOINTS))["components"]["schemas"]["CompletionRequest"]
    num_checked = 0
    for name in SamplingParams.__struct_fields__:
        for form in described["properties"].get(name, {}).get("anyOf", ()):
            for keyword, beyond in (("minimum", -1), ("maximum", 1)):
                if keyword in form:
                    assert getattr(SamplingParams(**{name: form[keyword]}), name) == form[keyword]
                    with pytest.raises(InvalidValue, match=name):
                        SamplingParams(**{name: form[keyword] + beyond})
                    num_checked += 1
    assert num_checked > 20


def test_no_request_that_is_drawn_meets_a_fault(drawn_at: Running, soak_factor: int) -> None:
    drawing = Drawing(drawn_at)
    for found in drawing.schema.get_all_operations():
        operation = found.ok()
        takes_nothing = not operation.body and not operation.query and not operation.path_parameters
        for mode in MODES if not takes_nothing else MODES[:1]:
            count = DRAWN.get(operation.path, OF_OTHERS)
            drawing.draw(operation, mode, count if soak_factor == 1 else count * soak_factor * 7 // 5)
    statuses = drawing.statuses
    assert statuses["200"] > 100 * soak_factor and statuses["400"] > 100 * soak_factor
    assert sum(statuses.values()) >= (1500 if soak_factor == 1 else 2000 * soak_factor)
    witness("schemathesis", requests=sum(statuses.values()), statuses=dict(statuses), events=drawing.num_events)
