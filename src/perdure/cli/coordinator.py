"""`perdure coordinator`: the program that clients and replicas of several processes or machines meet at."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from perdure import EngineConfig, InvalidValue
from perdure.cli.options import EngineOptions, SecretOption, spelled_out
from perdure.cli.output import remark

_DEFAULT = EngineConfig()


def _launcher(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Launcher")


@dataclass(frozen=True)
class LauncherOptions:
    """Whether replicas are started from here, and where."""

    launcher: Annotated[
        str | None, _launcher("ray: start replicas of --model over a Ray cluster, and lost ones again.")
    ] = None
    replicas: Annotated[int, _launcher("How many.")] = 1
    replica_cpus: Annotated[int, _launcher("Cores, and threads, of each.")] = 1
    replica_gpus: Annotated[int, _launcher("GPUs of each.")] = 0
    ray_address: Annotated[str, _launcher("Of the cluster; auto: the one that this machine is of.")] = "auto"
    drain: Annotated[float, _launcher("Seconds that requests may go on after SIGTERM.")] = 0.0

    def check(self, engine: EngineOptions) -> None:
        """Raises `InvalidValue`."""
        if self.launcher is None:
            if self != LauncherOptions() or engine != EngineOptions():
                raise InvalidValue("options of replicas are for those started from here: give --launcher ray")
            return
        if self.launcher != "ray":
            raise InvalidValue(f"--launcher: {self.launcher!r} is not ray")
        for name, least in (("replicas", 1), ("replica_cpus", 1), ("replica_gpus", 0), ("drain", 0)):
            if getattr(self, name) < least:
                raise InvalidValue(f"--{name.replace('_', '-')}: {getattr(self, name)} is less than {least}")


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
) -> None:
    """Route requests of many clients over the replicas that join. Ends with SIGTERM or Ctrl-C.

    Where it can be reached stands on stderr. An endpoint of other machines needs --secret-file.
    """
    launch.check(engine)
    config = EngineConfig.of(
        **engine.settings(),
        routing_policy=policy,
        routing_alpha=alpha,
        affinity_ttl=affinity_ttl,
        on_replica_loss=on_replica_loss,
        replica_wait_s=replica_wait,
    )
    secret = None if secret_file is None else str(secret_file)

    def say(where: str) -> None:
        remark(f"coordinator at {where}")

    if launch.launcher is None:
        from perdure.coordinator.service import serve

        serve(bind, secret, config, say)
        return

    from perdure.engine.on_ray import Place, serve_on_ray

    place = Place(launch.replica_cpus, launch.replica_gpus, launch.ray_address)
    serve_on_ray(bind, secret, config, launch.replicas, place, launch.drain, say)
