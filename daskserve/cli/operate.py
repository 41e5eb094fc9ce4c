"""``daskserve scale``, ``restart`` and ``delete``: what operators do to what runs."""

from __future__ import annotations

from typing import Any

import click

from daskserve.cli.completion import complete_applications
from daskserve.cli.instance import connected, instance_options
from daskserve.cli.output import errors_as_messages, json_option, print_json


def split_target(target: str) -> tuple[str, str | None]:
    """Return the application and the deployment of ``APP`` or ``APP/DEPLOYMENT``."""
    application, _, deployment = target.partition("/")
    return application, deployment or None


@click.command()
@click.argument("target", metavar="APP[/DEPLOYMENT]", shell_complete=complete_applications)
@click.argument("number", metavar="N", type=click.IntRange(1))
@instance_options
@json_option
def scale(target: str, number: int, address: str | None, name: str | None, as_json: bool) -> None:
    """Set the number of replicas of a deployment, or of an application's ingress.

    The number lasts until the deployment is deployed with other options; write it into the file to keep it. A
    deployment that is autoscaled cannot be scaled.
    """
    application, deployment = split_target(target)
    with errors_as_messages(), connected(address, name) as client:
        found = client.scale_deployment(application, deployment, number)
    _tell({"application": application, "deployment": deployment, "target_num_replicas": found}, as_json)


@click.command()
@click.argument("target", metavar="APP[/DEPLOYMENT]", shell_complete=complete_applications)
@instance_options
@click.option("--no-wait", is_flag=True, help="Return before the new replicas run.")
@json_option
def restart(target: str, address: str | None, name: str | None, no_wait: bool, as_json: bool) -> None:
    """Replace the replicas of an application, or of one deployment, by ones of the same code.

    New replicas start before old ones stop, as in an update, so that no request is lost. If they do not come
    up, the old ones stay, and the exit code is 1.
    """
    application, deployment = split_target(target)
    with errors_as_messages(), connected(address, name) as client:
        client.restart(application, deployment, blocking=not no_wait)
    _tell({"application": application, "deployment": deployment, "restarted": not no_wait}, as_json)


@click.command()
@click.argument("application", metavar="APP", shell_complete=complete_applications)
@instance_options
@click.option("--no-wait", is_flag=True, help="Return before its replicas have stopped.")
@json_option
def delete(application: str, address: str | None, name: str | None, no_wait: bool, as_json: bool) -> None:
    """Delete an application, be it from a file or from a program; requests under way complete.

    Deleting one that does not exist changes nothing, and is no error.
    """
    with errors_as_messages(), connected(address, name) as client:
        client.delete_application(application, blocking=not no_wait)
    _tell({"application": application, "deleted": True}, as_json)


def _tell(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    name = "/".join(filter(None, (found.pop("application"), found.pop("deployment", None))))
    ((what, value),) = found.items()
    click.echo(f"{name}: {what} {value}" if value is not True else f"{name}: {what}")
