"""``daskserve status``, ``shutdown`` and ``rewrite-store``: commands about a whole instance."""

from __future__ import annotations

import click

from daskserve.cli.instance import instance_options, known, running, tell
from daskserve.cli.output import errors_as_messages, is_terminal
from daskserve.client.client import Client
from daskserve.client.views.status import Status
from daskserve.options.specs import deployment_tag


@click.command()
@instance_options
def status(address: str | None, name: str | None) -> None:
    """Show what runs on a cluster, and why the rest does not."""
    tell(address, name, lambda client: str(client.status()))


@click.command()
@instance_options
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def shutdown(address: str | None, name: str | None, yes: bool) -> None:
    """End the instance on a cluster, with all its applications.

    Asks first on a terminal. Elsewhere, --yes is needed.
    """
    with errors_as_messages():
        client = running(known(address), name)
        if client is None:
            click.echo(str(Status()))
            return
        try:
            if not yes:
                confirm_end(client)
            client.shutdown()
        finally:
            client.disconnect()


def confirm_end(client: Client) -> None:
    """Ask whether to end an instance; raise if the answer is no, or if there is no terminal."""
    found = client.status()
    serves = ", ".join([*map(repr, found.applications), *sorted(_alone(found))]) or "nothing"
    what = f"instance {client.instance_name!r}, which serves {serves}"
    if not is_terminal():
        raise click.ClickException(f"This ends {what}. Add --yes, because there is no terminal to ask on.")
    click.confirm(f"End {what}?", abort=True)


def _alone(found: Status) -> set[str]:
    """Return the backends that belong to no application."""
    members = {
        deployment_tag(name, each) for name, app in found.applications.items() for each in app.deployments
    }
    return set(found.backends) - members


@click.command(name="rewrite-store")
@instance_options
def rewrite_store(address: str | None, name: str | None) -> None:
    """Rewrite all records of the instance on a cluster after its store was removed, moved or replaced."""
    tell(address, name, lambda client: f"{client.rewrite_store()} records written.")
