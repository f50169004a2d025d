"""Our own OpenAPI description, made of the table of endpoints and the structs of their bodies.

Types come from the structs. What these cannot say - ranges of numbers, ids of this model, what an object holds - is
added by field (`_limits`). What the `data:` lines of a stream hold stands as "x-data": OpenAPI 3.1 has no word for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from perdure import __version__
from perdure.api.sampling import ALL_LOGPROBS, MAX_BIAS, MAX_INTEGER, MAX_PENALTY, MAX_REPETITION, MAX_SAMPLES, MAX_SEED
from perdure.api.structured import KINDS
from perdure.server.endpoint import Endpoint
from perdure.server.front import ID_PATTERN
from perdure.server.protocol.common import Body, ErrorBody

_PATH_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_REF = "#/components/schemas/{name}"
_TEXT = {"type": "string"}
_SCORES = {"minimum": ALL_LOGPROBS, "maximum": MAX_INTEGER}
_PENALTY = {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}


def described(models: Sequence[str], vocab_size: int, endpoints: Sequence[Endpoint]) -> bytes:
    bodies = {kind for one in endpoints for kind in (one.takes, one.gives, one.streams) if kind is not None}
    kinds = sorted(bodies | {ErrorBody}, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(kinds, schemas, strict=True))
    limits = _limits(vocab_size) | {"model": {"enum": list(models)}}
    for kind in kinds:
        if issubclass(kind, Body):
            _limit(components[kind.__name__]["properties"], limits)
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        path = _PATH_PARAMETER.sub(r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, schema_of)
    return json.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "perdure", "version": __version__, "description": f"Serves {models[0]}."},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    ).encode()


def _limits(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Keywords of JSON Schema by field. "items" goes on, and a keyword is set only beside a type that it speaks of."""
    token_id = {"minimum": 0, "maximum": vocab_size - 1}
    return {
        "n": {"minimum": 1, "maximum": MAX_SAMPLES},
        "max_tokens": {"minimum": 0, "maximum": MAX_INTEGER},
        "max_completion_tokens": {"minimum": 0, "maximum": MAX_INTEGER},
        "max_output_tokens": {"minimum": 0, "maximum": MAX_INTEGER},
        "min_tokens": {"minimum": 0, "maximum": MAX_INTEGER},
        "temperature": {"minimum": 0},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1, "maximum": MAX_INTEGER},
        "min_p": {"minimum": 0, "maximum": 1},
        "repetition_penalty": {"minimum": 1 / MAX_REPETITION, "maximum": MAX_REPETITION},
        "presence_penalty": _PENALTY,
        "frequency_penalty": _PENALTY,
        "seed": {"minimum": 0, "maximum": MAX_SEED},
        "logprobs": _SCORES,
        "top_logprobs": _SCORES,
        "prompt_logprobs": _SCORES,
        "stream_interval": {"minimum": 1, "maximum": MAX_INTEGER},
        "priority": {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER},
        "logit_bias": {
            "propertyNames": {"pattern": "^[0-9]{1,19}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        },
        "prompt": {"items": {**token_id, "items": token_id}},
        "tokens": {"items": token_id},
        "allowed_token_ids": {"minItems": 1, "items": token_id},
        "bad_words": {"items": {"minLength": 1, "minItems": 1, "items": token_id}},
        "stop": {"minLength": 1, "items": {"minLength": 1}},
        "stop_token_ids": {"items": token_id},
        "stop_token_sequences": {"items": {"minItems": 1, "items": token_id}},
        "logprob_token_ids": {"items": token_id},
        "forced_token_ids": {"items": token_id},
        "request_id": {"pattern": f"^{ID_PATTERN}$"},
        "cache_salt": {"minLength": 1, "maxLength": 256},
        "messages": {"minItems": 1, "items": {"properties": {"role": _TEXT}, "required": ["role"]}},
        "structured_outputs": {
            "properties": {
                **{name: _TEXT for name in KINDS if name not in ("json", "choice")},
                "json": {"type": ["object", "string", "boolean"]},
                "choice": {"type": "array", "items": _TEXT, "minItems": 1},
                "json_object": {"type": "boolean"},
                "disable_any_whitespace": {"type": "boolean"},
            },
            "additionalProperties": False,
        },
    }


_SPEAKS_OF = {
    "number": {"minimum", "maximum", "exclusiveMinimum"},
    "integer": {"minimum", "maximum", "exclusiveMinimum"},
    "string": {"minLength", "maxLength", "pattern", "enum"},
    "array": {"minItems", "items"},
    "object": {"properties", "required", "propertyNames", "additionalProperties"},
}


def _limit(properties: dict[str, Any], limits: Mapping[str, dict[str, Any]]) -> None:
    for name, schema in properties.items():
        if name in limits:
            _add(schema, limits[name])


def _add(schema: dict[str, Any], limits: Mapping[str, Any]) -> None:
    """Limits to every form that the schema allows."""
    for form in schema.get("anyOf", ()):
        _add(form, limits)
    for keyword in _SPEAKS_OF.get(schema.get("type", ""), set()) & set(limits):
        if keyword == "items" and "items" in schema:
            _add(schema["items"], limits["items"])
        else:
            schema[keyword] = limits[keyword]


def _operation(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"description": "What was asked."}
    if endpoint.gives is not None:
        told["content"] = {"application/json": {"schema": schema_of[endpoint.gives]}}
    elif endpoint.media is not None:
        told["content"] = {endpoint.media: {"schema": _TEXT}}
    if endpoint.streams is not None:
        told["content"]["text/event-stream"] = {"x-data": schema_of[endpoint.streams]}
    error = {"description": "An error.", "content": {"application/json": {"schema": schema_of[ErrorBody]}}}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": {"200": told, "default": error}}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT}
        for name in _PATH_PARAMETER.findall(endpoint.path)
    ]
    parameters += [
        {"name": one.name, "in": "query", "required": False, "schema": one.schema} for one in endpoint.parameters
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.takes is not None:
        schema = schema_of[endpoint.takes]
        required = endpoint.access != "control" or bool(msgspec.json.schema(endpoint.takes).get("required"))
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    if endpoint.access != "open":
        operation["security"] = [{"key": []}]
    return operation
