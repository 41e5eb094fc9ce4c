"""``daskserve status``: what runs, once or whenever it changes."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace

import click

from daskserve.cli.completion import complete_applications
from daskserve.cli.instance import InstanceAddress, instance_options, known, reading
from daskserve.cli.output import (
    ExitCode,
    coloured,
    json_option,
    print_json,
)
from daskserve.client.client import Client
from daskserve.client.functions.discovery import instances
from daskserve.client.views.status import Status
from daskserve.errors import BadRequestError, NotFoundError


@click.command()
@instance_options
@click.option(
    "-n",
    "--name",
    "application",
    metavar="APP",
    shell_complete=complete_applications,
    help="Show only this application.",
)
@click.option("-w", "--watch", "watches", is_flag=True, help="Show it again after each change, until Ctrl-C.")
@json_option
def status(at: InstanceAddress, application: str | None, watches: bool, as_json: bool) -> None:
    """Show which applications run on a cluster, and why others do not.

    Exits with 1 if an application or a deployment has failed or is unhealthy. If there is no shared instance,
    and several programs have an instance of their own, all of them are shown, with --json as a list. With
    --watch, --json prints a line for each change.
    """
    if watches:
        with reading(at) as client:
            watch(client, application, as_json=as_json)
        return
    found, others = _statuses(at, application)
    if as_json:
        plain = [asdict(each) for each in found]
        print_json(plain[0] if len(plain) == 1 else plain)
    else:
        click.echo("\n\n".join(coloured(str(each)) for each in found))
        if others:
            click.echo(f"\nOther instances on this cluster: {', '.join(others)}. Show one with --instance.")
    if any(each.failed for each in found):
        click.get_current_context().exit(ExitCode.FAILED)


def _statuses(at: InstanceAddress, application: str | None) -> tuple[list[Status], list[str]]:
    """Return the status of the instance, or of all instances if none is named and all of them belong to
    programs.

    Also return the names of the instances that are not shown.
    """
    try:
        with reading(at) as client:
            others = [each for each in client.instances() if each != client.instance_name]
            return [_of(client.status(), application)], others
    except BadRequestError:
        if at.name is not None:
            raise
    found = []
    for each in instances(known(at.address)):
        with reading(replace(at, name=each)) as client:
            found.append(client.status())
    shown = [_of(each, application) for each in found if application in (None, *each.applications)]
    if not shown:
        raise NotFoundError(f"No instance on this cluster has an application {application!r}.")
    return shown, []


def _of(found: Status, application: str | None) -> Status:
    return found if application is None else found.only(application)


def watch(client: Client, application: str | None, *, as_json: bool) -> None:
    """Show the status whenever it changes, until Ctrl-C."""
    seen, shown = "", None
    try:
        while True:
            seen, status = client.next_status(seen)
            found = None if status is None else _of(status, application)
            if found is None or found == shown:
                continue
            shown = found
            if as_json:
                print_json(asdict(found), is_line=True)
                continue
            if sys.stdout.isatty():
                click.clear()
            click.echo(f"{coloured(str(found))}\n")
    except KeyboardInterrupt:
        return
