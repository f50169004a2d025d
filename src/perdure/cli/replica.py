"""`perdure replica`: an engine that serves a coordinator, started by whoever has machines to give."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure import EngineConfig
from perdure.cli.options import EngineOptions, SecretOption, spelled_out
from perdure.cli.output import remark


@spelled_out
def replica(
    engine: EngineOptions,
    join: Annotated[str, typer.Option(metavar="ENDPOINT", help="The coordinator's: tcp://HOST:PORT or ipc://PATH.")],
    index: Annotated[int, typer.Option(help="Its place among the replicas, from 0.")] = 0,
    secret_file: SecretOption = None,
) -> None:
    """Serve a coordinator until it stops everything. With SIGTERM it leaves, and its requests go on at others."""
    config = EngineConfig.of(**engine.settings(), replica=index)

    from perdure.engine.replica import serve

    serve(join, None if secret_file is None else str(secret_file), config, remark)
