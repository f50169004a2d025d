"""`perdure coordinator`: the program that clients and replicas of several processes or machines meet at."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure import EngineConfig
from perdure.cli.options import SecretOption
from perdure.cli.output import remark

_DEFAULT = EngineConfig()


def coordinator(
    bind: Annotated[str, typer.Argument(metavar="ENDPOINT", help="tcp://HOST:PORT (* = some port) or ipc://PATH.")],
    policy: Annotated[
        str, typer.Option(help="round_robin, load_balanced, longest_prefix or first_prefix_block.")
    ] = _DEFAULT.routing_policy,
    alpha: Annotated[float, typer.Option(help="What load counts against a cached prefix.")] = _DEFAULT.routing_alpha,
    affinity_ttl: Annotated[
        float, typer.Option(help="Seconds after which a prefix that was sent counts no more.")
    ] = _DEFAULT.affinity_ttl,
    on_replica_loss: Annotated[
        str, typer.Option(help="resume: requests of a lost replica go on at others; fail: they fail.")
    ] = _DEFAULT.on_replica_loss,
    replica_wait: Annotated[
        float, typer.Option(help="Seconds that requests wait where no replica serves.")
    ] = _DEFAULT.replica_wait_s,
    secret_file: SecretOption = None,
) -> None:
    """Route requests of many clients over the replicas that join. Ends with SIGTERM or Ctrl-C.

    Where it can be reached stands on stderr. An endpoint of other machines needs --secret-file.
    """
    config = EngineConfig.of(
        routing_policy=policy,
        routing_alpha=alpha,
        affinity_ttl=affinity_ttl,
        on_replica_loss=on_replica_loss,
        replica_wait_s=replica_wait,
    )

    from perdure.coordinator.service import serve

    serve(
        bind, None if secret_file is None else str(secret_file), config, lambda where: remark(f"coordinator at {where}")
    )
