"""`perdure coordinator`: the program that clients and replicas of several processes or machines meet at."""

from typing import Annotated, Any

import typer

from perdure import EngineConfig, InvalidValue
from perdure.cli.options import EngineOptions, LauncherOptions, SecretOption, spelled_out
from perdure.cli.output import remark

_DEFAULT = EngineConfig()


def _launcher(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Launcher")


@spelled_out
def coordinator(
    engine: EngineOptions,
    launch: LauncherOptions,
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
    replicas: Annotated[int, _launcher("How many.")] = 1,
    drain: Annotated[float, _launcher("Seconds that requests may go on after SIGTERM.")] = 0.0,
) -> None:
    """Route requests of many clients over the replicas that join. Ends with SIGTERM or Ctrl-C.

    Where it can be reached stands on stderr. An endpoint of other machines needs --secret-file.
    """
    placed = launch.settings()
    if not placed and (engine, replicas, drain) != (EngineOptions(), 1, 0.0):
        raise InvalidValue("options of replicas are for those started from here: give --launcher ray")
    for name, value, least in (("replicas", replicas, 1), ("drain", drain, 0)):
        if value < least:
            raise InvalidValue(f"--{name}: {value} is less than {least}")
    config = EngineConfig.of(
        **engine.settings(),
        **placed,
        data_parallel_size=replicas,
        routing_policy=policy,
        routing_alpha=alpha,
        affinity_ttl=affinity_ttl,
        on_replica_loss=on_replica_loss,
        replica_wait_s=replica_wait,
    )
    secret = None if secret_file is None else str(secret_file)

    def say(where: str) -> None:
        remark(f"coordinator at {where}")

    if not placed:
        from perdure.coordinator.service import serve

        serve(bind, secret, config, say)
        return

    from perdure.engine.on_ray import serve_on_ray

    serve_on_ray(bind, secret, config, drain, say)
