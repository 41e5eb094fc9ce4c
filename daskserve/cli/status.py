"""``daskserve status``, ``shutdown`` and ``rewrite-store``: commands about a whole instance."""

from __future__ import annotations

from dataclasses import asdict

import click

from daskserve.cli.instance import connected, instance_options, tell
from daskserve.cli.output import (
    ExitCode,
    coloured,
    errors_as_messages,
    is_terminal,
    json_option,
    print_json,
)
from daskserve.client.client import Client
from daskserve.client.views.status import Status
from daskserve.errors import NotRunningError


@click.command()
@instance_options
@click.option("-n", "--name", "application", metavar="APP", help="Show only this application.")
@json_option
def status(address: str | None, name: str | None, application: str | None, as_json: bool) -> None:
    """Show what runs on a cluster, and why the rest does not.

    Exits with 1 if an application or a deployment has failed or is unhealthy.
    """
    with errors_as_messages(), connected(address, name) as client:
        found = client.status() if application is None else client.status().only(application)
    if as_json:
        print_json(asdict(found))
    else:
        click.echo(coloured(str(found)))
    if found.failed:
        click.get_current_context().exit(ExitCode.FAILED)


@click.command()
@instance_options
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def shutdown(address: str | None, name: str | None, yes: bool) -> None:
    """End the instance on a cluster, with all its applications.

    Asks first on a terminal. Elsewhere, --yes is needed. Without an instance there is nothing to end.
    """
    with errors_as_messages():
        try:
            with connected(address, name) as client:
                if not yes:
                    confirm_end(client)
                client.shutdown()
        except NotRunningError:
            if name is not None:
                raise
            click.echo(str(Status()))


def confirm_end(client: Client) -> None:
    """Ask whether to end an instance; raise if the answer is no, or if there is no terminal."""
    found = client.status()
    alone = sorted(tag for tag, each in found.backends.items() if not each.application)
    serves = ", ".join([*map(repr, found.applications), *alone]) or "nothing"
    what = f"instance {client.instance_name!r}, which serves {serves}"
    if not is_terminal():
        raise click.ClickException(f"This ends {what}. Add --yes, because there is no terminal to ask on.")
    click.confirm(f"End {what}?", abort=True)


@click.command(name="rewrite-store")
@instance_options
def rewrite_store(address: str | None, name: str | None) -> None:
    """Rewrite all records of the instance on a cluster after its store was removed, moved or replaced."""
    tell(address, name, lambda client: f"{client.rewrite_store()} records written.")
