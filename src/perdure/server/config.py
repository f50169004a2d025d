"""`ServeConfig`: what a server is told beside its engine's configuration. Frozen, checked where it is built."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from perdure.api.errors import InvalidValue

ToolParserName = Literal["auto", "none", "hermes", "llama3_json", "qwen"]
ReasoningParserName = Literal["none", "think"]


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """connect: a coordinator's endpoint, whose replicas are served, with the secret in secret_file if it has one;
    None = an engine of the server's own. host, port: where it listens; port 0 is some free one. served_model_name: what
    clients call the model; None = as it was given. api_keys: one of these must come with every request; () = none is
    asked. control_keys: the same of control verbs; () = these are refused to everybody, unless open_control gives them
    to whoever can reach the server.
    allowed_origins: web pages of these may call. ssl_certfile, ssl_keyfile: for HTTPS.
    max_body_bytes: of a request. drain_timeout_s: how long requests may still take after SIGTERM.
    tool_call_parser: how calls of tools stand in the model's text; auto = as its chat template writes them.
    reasoning_parser: "think" = text between <think> and </think> is the answer's `reasoning_content`.
    log_requests: a line of JSON on stderr for each request. otlp_traces_endpoint: where OpenTelemetry's spans of them
    go, as http://localhost:4318/v1/traces. num_front_ends: processes that share the port; with more
    than one the engine is apart from them, behind a coordinator.
    """

    connect: str | None = None
    secret_file: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    control_keys: tuple[str, ...] = ()
    open_control: bool = False
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    max_body_bytes: int = 32 * 2**20
    drain_timeout_s: float = 30.0
    tool_call_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "none"
    log_requests: bool = False
    otlp_traces_endpoint: str | None = None
    num_front_ends: int = 1

    def __post_init__(self) -> None:
        _number("port", self.port, 0, 65535)
        _number("num_front_ends", self.num_front_ends, 1, 256)
        _number("max_body_bytes", self.max_body_bytes, 1, 2**40)
        _number("drain_timeout_s", self.drain_timeout_s, 0, 1e9)
        for name, allowed in (("tool_call_parser", ToolParserName), ("reasoning_parser", ReasoningParserName)):
            if getattr(self, name) not in get_args(allowed):
                raise InvalidValue(f"{name}={getattr(self, name)!r} is none of {', '.join(get_args(allowed))}")
        for name in ("api_keys", "control_keys"):
            if not all(
                isinstance(key, str) and key.isascii() and key.strip() == key != "" for key in getattr(self, name)
            ):
                raise InvalidValue(f"{name} holds what is no key: ASCII without space around it, not empty")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidValue("ssl_certfile and ssl_keyfile go together: give both or none")
        if self.open_control and self.control_keys:
            raise InvalidValue("open_control=True asks for no key, and control_keys names some: give one of them")


def _number(name: str, value: Any, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidValue(f"{name}={value!r} is no number from {least:g} to {most:g}")
