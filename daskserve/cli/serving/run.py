"""``daskserve run``: serve an application from a shell."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import click
import dask.config

from daskserve.cli.completion import complete_files
from daskserve.cli.instance import address_option
from daskserve.cli.output import FiniteRange, errors_as_messages, options
from daskserve.cli.serving.http_options import given_http_options, http_options
from daskserve.cli.serving.process import (
    env_file_option,
    log_level_option,
    log_options,
    use_env_file,
    use_log_level,
    use_log_options,
)
from daskserve.cli.serving.targets import (
    Served,
    check_file_options,
    environment_options,
    given_environment,
    served_file,
    served_path,
)
from daskserve.cli.serving.tracing import given_tracing, tracing_options
from daskserve.client.hosting.hosting import HostingMode, host
from daskserve.client.hosting.reloading.files import Patterns
from daskserve.client.verbs.applications import RunTarget
from daskserve.common import settings
from daskserve.common.types import DEFAULT_APPLICATION, Location
from daskserve.config_file.reading import is_config_file

#: The strategies for replacing replicas after a file has changed.
ROLLING_UPDATE, RECREATE = "rolling-update", "recreate"


#: The options for reloading when files change, with uvicorn's names.
reload_options = options(
    click.option(
        "-r",
        "--reload",
        is_flag=True,
        help="Deploy the application again when its files change, for as long as the command runs.",
    ),
    click.option(
        "--reload-dir",
        "reload_dirs",
        multiple=True,
        type=click.Path(exists=True, file_okay=False),
        help="Folder to watch, instead of --app-dir. May be repeated.",
    ),
    click.option(
        "--reload-include",
        "reload_includes",
        multiple=True,
        metavar="PATTERN",
        help="Other files to watch than *.py, such as '*.html'. May be repeated.",
    ),
    click.option(
        "--reload-exclude",
        "reload_excludes",
        multiple=True,
        metavar="PATTERN",
        help="Files and folders that are not watched. May be repeated.",
    ),
    click.option(
        "--reload-strategy",
        type=click.Choice([ROLLING_UPDATE, RECREATE]),
        default=ROLLING_UPDATE,
        show_default=True,
        help="Whether new replicas start before the old ones end, or after it: for code that holds a "
        "port, a GPU or much memory.",
    ),
)


@click.command()
@click.argument("target", shell_complete=complete_files)
@click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--name", default=DEFAULT_APPLICATION, show_default=True, help="Name of the application.")
@click.option("--route-prefix", default="/", show_default=True, help="Path prefix for its HTTP requests.")
@click.option(
    "--factory",
    is_flag=True,
    help="Call TARGET, without arguments, in each replica to build the application.",
)
@click.option(
    "-d",
    "--app-dir",
    default=".",
    show_default=True,
    type=click.Path(exists=True, file_okay=False),
    help="Folder in which modules are found first.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help=(
        "Number of replicas of the ingress, each in a separate process. Without --address, these are the "
        "workers of the cluster, each with a proxy; they share the port."
    ),
)
@environment_options
@env_file_option
@log_level_option
@log_options
@address_option
@http_options
@tracing_options
@click.option(
    "--blocking/--non-blocking",
    default=True,
    show_default=True,
    help="Serve until Ctrl-C, or deploy the application, or a new version of it, and leave it running.",
)
@click.option(
    "--replace",
    is_flag=True,
    help="Replace an application of this name that runs already. The new version stays.",
)
@click.option(
    "--restore",
    is_flag=True,
    help="Replace it until Ctrl-C, and then restore the old version.",
)
@click.option(
    "--timeout-s",
    type=FiniteRange(0, min_open=True),
    help="Time in seconds after which a change that is not complete is rolled back.",
)
@reload_options
def run(
    target: str,
    arguments: tuple[str, ...],
    name: str,
    route_prefix: str,
    factory: bool,
    app_dir: str,
    workers: int | None,
    env_file: str | None,
    log_level: str | None,
    address: str | None,
    blocking: bool,
    replace: bool,
    restore: bool,
    timeout_s: float | None,
    reload: bool,
    reload_strategy: str,
    **others: Any,
) -> None:
    """Serve the application TARGET, given as module:name, or those of a configuration file, until Ctrl-C.

    TARGET names a FastAPI, Starlette or other ASGI application, what .bind() returns, or a function that
    builds one of these from a dict of KEY=VALUE. Modules are found in the current directory, or in
    --app-dir.

    Without --address, a local Dask cluster is started, which ends with the command. Its worker imports the
    module, and the port opens once the application is up. Unless they are given, --server is asyncio there,
    and with --workers, --location is EveryWorker. With --address, the workers must be able to import the
    module. When it ends, the command deletes the application. It stops the instance only if it has started it
    and no other program uses it. Applications that it has only updated keep running. If the command fails or
    is interrupted before the application is up, nothing changes.

    With --reload, a saved file replaces the application on the same port, without losing a request. Code that
    cannot be imported, or does not start, is reported, and the version from before keeps serving.
    """
    check_uses(blocking=blocking, restore=restore, reload=reload, watched=others)
    if is_config_file(target):
        check_file_options(target, arguments)
    use_log_level(log_level)
    variables = use_env_file(env_file)
    sys.path.insert(0, os.path.abspath(app_dir))
    cluster = address or dask.config.get("scheduler-address", None)
    ingress = replicas_in_processes(workers, on_own_cluster=cluster is None)

    def find() -> Served:
        if is_config_file(target):
            found = served_file(target, timeout_s)
        else:
            pairs = None if factory else parsed(arguments)
            # The workers of a cluster that runs already do not have this process's variables.
            environment = given_environment(others, variables if cluster else {})
            path = RunTarget(target, name, route_prefix, pairs)
            found = served_path(path, environment, is_factory=factory, timeout_s=timeout_s)
        return dataclasses.replace(found, source=dataclasses.replace(found.source, ingress=ingress))

    with errors_as_messages(), sigterm_as_interrupt():
        served = find()
        use_log_options(others, served.logging_config, is_access_log_on=True)
        stay = HostingMode(
            blocking,
            replace,
            restore,
            files_to_watch(target, app_dir, others) if reload else None,
            reload_strategy == RECREATE,
        )
        http = {**served.http_options, **given_http_options(others)}
        with own_cluster(workers, http) if cluster is None else nullcontext(http) as options:
            host(
                served.source,
                options,
                tracing_config=({**served.tracing_config, **given_tracing(others)} or None),
                address=cluster,
                stay=stay,
                report=click.echo,
                reread=lambda: find().source,
            )


def replicas_in_processes(workers: int | None, *, on_own_cluster: bool) -> dict[str, Any]:
    """Return the options of the ingress for a number of replicas, each in its own process."""
    if workers is None:
        return {}
    # The command's own cluster has a worker process for each replica.
    return {"num_replicas": workers} | ({} if on_own_cluster else {"isolation": "process"})


@contextmanager
def own_cluster(workers: int | None, http: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Configure the cluster that the command starts for a number of replicas; yield its HTTP options.

    Each replica has a worker with a proxy. They share the port, as the processes of ``uvicorn --workers`` do.
    """
    options: dict[str, Any] = {"server": "asyncio"}
    size = {}
    if workers is not None:
        options["location"] = Location.EVERY_WORKER
        size = {"daskserve.local-cluster.n-workers": workers}
    with dask.config.set(size):
        yield {**options, **settings.http_defaults(), **http}


def check_uses(*, blocking: bool, restore: bool, reload: bool, watched: Mapping[str, Any]) -> None:
    """Raise `click.UsageError` if an option is given without another option that it requires."""
    if restore and not blocking:
        raise click.UsageError("--restore restores the old version when the command ends; add --blocking.")
    if reload and not blocking:
        raise click.UsageError("--reload watches files while the command runs; add --blocking.")
    alone = [name for name in ("reload_dirs", "reload_includes", "reload_excludes") if watched[name]]
    if alone and not reload:
        option = f"--{alone[0].removesuffix('s').replace('_', '-')}"
        raise click.UsageError(f"{option} says which files --reload watches; add --reload.")


def files_to_watch(target: str, app_dir: str, watched: Mapping[str, Any]) -> Patterns:
    """Return the files that --reload watches."""
    configuration = target if is_config_file(target) else ""
    folders = watched["reload_dirs"] or (app_dir,)
    return Patterns.of(folders, watched["reload_includes"], watched["reload_excludes"], configuration)


def parsed(arguments: tuple[str, ...]) -> Mapping[str, str]:
    """Return the arguments of a builder."""
    pairs = [each.partition("=") for each in arguments]
    for key, equals, _ in pairs:
        if not equals or not key:
            raise click.UsageError(f"Write arguments of a builder as KEY=VALUE, got {key + equals!r}.")
    return {key: value for key, _, value in pairs}


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does, even during startup."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = {each: signal.signal(each, interrupt) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
