"""`perdure serve`: OpenAI's interface over HTTP."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from perdure import EngineConfig, InvalidValue
from perdure.cli.config_file import ConfigOption
from perdure.cli.options import EngineOptions, LauncherOptions, SecretOption, spelled_out
from perdure.cli.output import remark

KEY_VARIABLE, CONTROL_KEY_VARIABLE = "PERDURE_API_KEY", "PERDURE_CONTROL_KEY"


def _option(text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Server", show_default=False, metavar=metavar)


@spelled_out
def serve(
    engine: EngineOptions,
    launch: LauncherOptions,
    model_argument: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
    ] = None,
    config_file: ConfigOption = None,
    data_parallel_size: Annotated[int, _option("Engines, each in a process of its own, behind one coordinator.")] = 1,
    max_num_waiting: Annotated[int | None, _option("Most requests that wait; more are refused with 429.")] = None,
    connect: Annotated[
        str | None, _option("Serve what a coordinator that is there already has.", metavar="ENDPOINT")
    ] = None,
    secret_file: SecretOption = None,
    host: Annotated[str, _option("Where to listen; 0.0.0.0 is for everybody.")] = "127.0.0.1",
    port: Annotated[int, _option("0: some free one.")] = 8000,
    served_model_name: Annotated[str | None, _option("What clients call the model.")] = None,
    api_key: Annotated[
        list[str] | None, _option(f"Ask for this key, or another so given; also {KEY_VARIABLE}.", metavar="KEY")
    ] = None,
    control_key: Annotated[
        list[str] | None, _option(f"Of control verbs, closed without; also {CONTROL_KEY_VARIABLE}.", metavar="KEY")
    ] = None,
    open_control: Annotated[bool, _option("Control verbs for whoever reaches the server.", "--open-control")] = False,
    allowed_origin: Annotated[
        list[str] | None, _option("Web pages of this origin may call; may be repeated.", metavar="ORIGIN")
    ] = None,
    ssl_certfile: Annotated[str | None, _option("For HTTPS.", metavar="FILE")] = None,
    ssl_keyfile: Annotated[str | None, _option("For HTTPS.", metavar="FILE")] = None,
    max_body_bytes: Annotated[int, _option("Of one request.")] = 32 * 2**20,
    drain_timeout: Annotated[float, _option("Seconds that requests may still take after SIGTERM.")] = 30.0,
    tool_call_parser: Annotated[str, _option("auto, none, hermes, llama3_json or qwen.")] = "auto",
    reasoning_parser: Annotated[str, _option("think: <think> ... </think> is reasoning_content; none.")] = "none",
    num_front_ends: Annotated[int, _option("Processes that share the port; the engine is then apart.")] = 1,
    log_requests: Annotated[bool, _option("A line of JSON on stderr for each request.", "--log-requests")] = False,
    otlp_traces_endpoint: Annotated[
        str | None, _option("Send OpenTelemetry's spans of requests there; needs perdure[otel].", metavar="URL")
    ] = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's interface. Ends with SIGTERM or Ctrl-C, when requests have ended."""
    settings = engine.settings() | launch.settings()
    if model_argument is not None:
        settings["model"] = model_argument
    settings["data_parallel_size"] = data_parallel_size
    if max_num_waiting is not None:
        settings["max_num_waiting"] = max_num_waiting
    config = EngineConfig.of(**settings)
    if connect is not None and config != EngineConfig():
        raise InvalidValue("--connect: replicas that are there have settings of their own: give none of an engine here")
    if connect is None and secret_file is not None:
        raise InvalidValue("--secret-file is the coordinator's that --connect names: give both")

    from perdure.server.config import ServeConfig
    from perdure.server.serve import serve as run

    serving: dict[str, Any] = {
        "connect": connect,
        "secret_file": None if secret_file is None else str(secret_file),
        "host": host,
        "port": port,
        "served_model_name": served_model_name,
        "api_keys": _keys(api_key, KEY_VARIABLE),
        "control_keys": _keys(control_key, CONTROL_KEY_VARIABLE),
        "open_control": open_control,
        "allowed_origins": tuple(allowed_origin or ()),
        "ssl_certfile": ssl_certfile,
        "ssl_keyfile": ssl_keyfile,
        "max_body_bytes": max_body_bytes,
        "drain_timeout_s": drain_timeout,
        "tool_call_parser": tool_call_parser,
        "reasoning_parser": reasoning_parser,
        "num_front_ends": num_front_ends,
        "log_requests": log_requests,
        "otlp_traces_endpoint": otlp_traces_endpoint,
    }
    run(config, ServeConfig(**serving), remark)


def _keys(given: list[str] | None, variable: str) -> tuple[str, ...]:
    """As given, else as the environment says, which no list of processes shows."""
    found = given or ([os.environ[variable]] if os.environ.get(variable) else [])
    return tuple(found)
