"""``daskserve start`` and ``controller-health``: instances without applications."""

from __future__ import annotations

from typing import Any

import click
import dask.config

from daskserve.cli.instance import InstanceAddress, address_option, checked_name, connected, instance_options
from daskserve.cli.output import ExitCode, FiniteRange, errors_as_messages, json_option, print_json, spelled
from daskserve.cli.serving.http_options import given_http_options, http_options
from daskserve.cli.serving.process import log_level_option, log_options, use_log_level, use_log_options
from daskserve.cli.serving.tracing import given_tracing, tracing_options
from daskserve.client.hosting.detached import DetachedInstance, start_detached
from daskserve.common.types import DEFAULT_INSTANCE
from daskserve.errors import UnavailableError


@click.command()
@address_option
@click.option(
    "--store",
    default="memory://",
    show_default=True,
    help=(
        "URL of the store for the instance's records: memory://, sqlite:///path or any fsspec URL. Paths "
        "are on the scheduler's host. An instance that finds records there restores them."
    ),
)
@click.option(
    "--name",
    default=DEFAULT_INSTANCE,
    show_default=True,
    callback=checked_name,
    help=(
        "Name of the instance. Other commands select it with --instance. A second instance needs its own "
        "--port."
    ),
)
@log_level_option
@log_options
@http_options
@tracing_options
@json_option
def start(
    address: str | None, store: str, name: str, log_level: str | None, as_json: bool, **others: Any
) -> None:
    """Start an instance that runs until `daskserve shutdown`, unless an instance with this name already runs.

    Without --address, and without scheduler-address in Dask's configuration, a local Dask cluster is started
    as well, and ends with the instance. The output has its address, for the other commands.

    If an instance already runs, it keeps its HTTP options, and a warning lists the options that differ.
    """
    use_log_level(log_level)
    use_log_options(others)
    known_address = address or dask.config.get("scheduler-address", None)
    given = given_http_options(others)
    with errors_as_messages():
        found = start_detached(
            given,
            address=known_address,
            store=store,
            name=name,
            tracing_config=given_tracing(others) or None,
        )
        try:
            if found.differences:
                text = f"An instance is already running; its HTTP options do not change: {found.differences}."
                click.secho(f"Warning: {spelled(text)}", fg="yellow", err=True)
            report(found, owns_cluster=known_address is None, as_json=as_json)
        finally:
            found.client.disconnect()


def report(found: DetachedInstance, *, owns_cluster: bool, as_json: bool) -> None:
    """Print where an instance runs."""
    name, address = found.client.instance_name, found.client.scheduler_address
    urls, page = found.client.http_urls(), found.client.page_link
    if as_json:
        facts = {"instance": name, "scheduler_address": address, "http_urls": urls}
        print_json({**facts, "page": page, "is_new": found.is_new})
        return
    where = f" at {', '.join(urls)}" if urls else ""
    click.echo(f"Instance {name!r} {'runs' if found.is_new else 'runs already'}{where}.")
    if page is not None:
        click.echo(f"Watch it at {page}")
    if owns_cluster:
        click.echo(
            f"It has a Dask cluster of its own: use it with --address {address}, or set "
            f"DASK_SCHEDULER_ADDRESS={address}."
        )


@click.command(name="controller-health")
@instance_options
@click.option(
    "--timeout-s",
    type=FiniteRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="Time in seconds within which the controller must answer.",
)
@json_option
def controller_health(at: InstanceAddress, timeout_s: float, as_json: bool) -> None:
    """Print whether the controller answers, where it runs, and the delay of its event loop.

    Exits with 1 if it does not answer, and with 3 if no instance runs. Requests are served even without a
    controller.
    """
    with connected(at) as client:
        try:
            found = {"is_alive": True, **client.controller_health(timeout_s)}
        except UnavailableError as error:
            found = {"is_alive": False, "error": str(error)}
    if as_json:
        print_json(found)
    elif found["is_alive"]:
        delay = found["event_loop_delay_s"]
        click.echo(
            f"The controller runs on {found['worker']} (process {found['pid']}, epoch {found['epoch']}). Its "
            f"event loop is {1000 * delay:.1f} ms late."
        )
        if found.get("num_control_loops"):
            click.echo(
                f"{found['num_control_loops']} rounds of its loop took "
                f"{1000 * found['mean_control_loop_duration_s']:.1f} ms each, "
                f"{1000 * found['p99_control_loop_duration_s']:.1f} ms at the 99th percentile; "
                f"{found['num_asyncio_tasks']} tasks, {found['process_memory_mb']:.0f} MB."
            )
    else:
        click.echo(found["error"], err=True)
    if not found["is_alive"]:
        click.get_current_context().exit(ExitCode.FAILED)
