"""Our own OpenAPI description, made of the table of endpoints and the structs of their bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from perdure import __version__
from perdure.server.endpoint import Endpoint
from perdure.server.protocol.common import ErrorBody

_PATH_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_REF = "#/components/schemas/{name}"


def described(model: str, endpoints: Sequence[Endpoint]) -> bytes:
    bodies = {kind for one in endpoints for kind in (one.takes, one.gives) if kind is not None} | {ErrorBody}
    kinds = sorted(bodies, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        path = _PATH_PARAMETER.sub(r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, schema_of)
    return json.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "perdure", "version": __version__, "description": f"Serves {model}."},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    ).encode()


def _operation(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"description": "What was asked."}
    if endpoint.gives is not None:
        told["content"] = {"application/json": {"schema": schema_of[endpoint.gives]}}
    if endpoint.works:
        told["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"description": "An error.", "content": {"application/json": {"schema": schema_of[ErrorBody]}}}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": {"200": told, "default": error}}
    parameters = [(name, "path") for name in _PATH_PARAMETER.findall(endpoint.path)]
    parameters += [(name, "query") for name in endpoint.parameters]
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for name, place in parameters
        ]
    if endpoint.takes is not None:
        schema = schema_of[endpoint.takes]
        required = endpoint.access != "control" or bool(msgspec.json.schema(endpoint.takes).get("required"))
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    if endpoint.access != "open":
        operation["security"] = [{"key": []}]
    return operation
