"""``daskserve scale``, ``restart``, ``delete``, ``rollback``, ``shutdown``."""

from __future__ import annotations

from typing import Any

import click

from daskserve.cli.completion import complete_applications
from daskserve.cli.instance import InstanceAddress, connected, instance_options, split_target
from daskserve.cli.output import FiniteRange, is_terminal, json_option, print_json
from daskserve.client.client import Client
from daskserve.client.views.status import Status
from daskserve.errors import NotFoundError, NotRunningError


@click.command()
@click.argument("target", metavar="APP[/DEPLOYMENT]", shell_complete=complete_applications)
@click.argument("number", metavar="N", type=click.IntRange(1))
@instance_options
@json_option
def scale(at: InstanceAddress, target: str, number: int, as_json: bool) -> None:
    """Set the number of replicas of a deployment, or of an application's ingress.

    The number applies until the deployment is deployed with other code or options; write it into the file to
    keep it. A deployment that is autoscaled cannot be scaled.
    """
    application, deployment = split_target(target)
    with connected(at) as client:
        found = client.scale_deployment(application, deployment, number)
    _print_result(
        {"application": application, "deployment": deployment, "target_num_replicas": found}, as_json
    )


@click.command()
@click.argument("target", metavar="APP[/DEPLOYMENT]", shell_complete=complete_applications)
@instance_options
@click.option("--no-wait", is_flag=True, help="Return before the new replicas run.")
@json_option
def restart(at: InstanceAddress, target: str, no_wait: bool, as_json: bool) -> None:
    """Replace the replicas of an application, or of one deployment, by ones of the same code.

    New replicas start before old ones stop, as in an update, so that no request is lost. If the new replicas
    do not start, the old ones keep running, and the exit code is 1.
    """
    application, deployment = split_target(target)
    with connected(at) as client:
        client.restart(application, deployment, blocking=not no_wait)
    _print_result({"application": application, "deployment": deployment, "restarted": not no_wait}, as_json)


@click.command()
@click.argument("application", metavar="APP", shell_complete=complete_applications)
@instance_options
@click.option("--no-wait", is_flag=True, help="Return before its replicas have stopped.")
@click.option("--ignore-not-found", is_flag=True, help="Exit with 0 if there is no such application.")
@json_option
def delete(
    at: InstanceAddress, application: str, no_wait: bool, ignore_not_found: bool, as_json: bool
) -> None:
    """Delete an application, deployed from a file or by a program; requests in flight complete.

    If there is no such application, the exit code is 1.
    """
    with connected(at) as client:
        try:
            client.delete_application(application, blocking=not no_wait, missing_ok=False)
        except NotFoundError:
            if not ignore_not_found:
                raise
            _print_result({"application": application, "not found": True}, as_json)
            return
    _print_result({"application": application, "deleted": True}, as_json)


@click.command()
@click.argument("application", metavar="APP", shell_complete=complete_applications)
@click.argument("revision", type=click.IntRange(1, 10**9), required=False)
@instance_options
@click.option("--wait", is_flag=True, help="Return once it runs, or exit with 1 if it fails.")
@click.option(
    "--timeout-s",
    type=FiniteRange(0, min_open=True),
    help="Time in seconds after which the rollback, if it is not complete, is undone.",
)
@json_option
def rollback(
    at: InstanceAddress,
    application: str,
    revision: int | None,
    wait: bool,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Deploy an earlier revision of APP again; by default, the last one that ran before.

    The rollback is a revision, too, so it can be rolled back.
    """
    with connected(at) as client:
        number = client.rollback(application, revision, timeout_s=timeout_s, blocking=wait)
    if as_json:
        print_json({"application": application, "rollback_of": number, "is_complete": wait})
    else:
        state = "runs again" if wait else "is being deployed again"
        click.echo(f"Revision {number} of application {application!r} {state}.")


@click.command()
@instance_options
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def shutdown(at: InstanceAddress, yes: bool, as_json: bool) -> None:
    """End the instance on a cluster, with all its applications.

    Asks first on a terminal. Elsewhere, --yes is needed. Without an instance there is nothing to end.
    """
    try:
        with connected(at) as client:
            if not yes:
                confirm_end(client)
            ended = client.instance_name
            client.shutdown()
    except NotRunningError:
        if at.name is not None:
            raise
        ended = None
    if as_json:
        print_json({"instance": ended, "ended": ended is not None})
    elif ended is None:
        click.echo(str(Status()))


def confirm_end(client: Client) -> None:
    """Ask the user whether to end an instance; raise if the answer is no, or if there is no terminal."""
    found = client.status()
    alone = sorted(tag for tag, each in found.backends.items() if not each.application)
    serves = ", ".join([*map(repr, found.applications), *alone]) or "nothing"
    what = f"instance {client.instance_name!r}, which serves {serves}"
    if not is_terminal():
        raise click.ClickException(f"This ends {what}. Add --yes, because there is no terminal to ask on.")
    click.confirm(f"End {what}?", abort=True)


def _print_result(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    name = "/".join(filter(None, (found.pop("application"), found.pop("deployment", None))))
    ((what, value),) = found.items()
    click.echo(f"{name}: {what} {value}" if value is not True else f"{name}: {what}")
