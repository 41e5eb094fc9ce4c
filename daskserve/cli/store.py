"""``daskserve store`` and ``rewrite-store``: back up, restore, check, list and rewrite stores."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from daskserve import stores
from daskserve.cli.instance import InstanceAddress, connected, instance_options
from daskserve.cli.output import ExitCode, errors_as_messages, json_option, print_json
from daskserve.client.views.table import table
from daskserve.common.formatting import counted


@click.group()
def store() -> None:
    """Back up, restore, check and list stores.

    URL is the value of store= with which the instance was started, such as sqlite:////var/lib/serve.db. Paths
    are those of this machine: for a store on a disk, run this where the scheduler runs.
    """


def _stored(context: click.Context, parameter: click.Parameter, place: str) -> str:
    """Raise an error for a file that does not exist, as click does for options that are files."""
    if "://" not in place and not Path(place).is_file():
        raise click.BadParameter(
            f"There is no file {place!r}. A backup is a file, and a store is a URL, such as "
            "sqlite:////var/lib/serve.db."
        )
    return place


instances_option = click.option(
    "--instance",
    "instances",
    multiple=True,
    help="Name of an instance; may be given several times. Default: all.",
)


@store.command()
@click.argument("url")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@instances_option
@json_option
def backup(url: str, file: Path, instances: tuple[str, ...], as_json: bool) -> None:
    """Write the store at URL to FILE, also while an instance runs on it.

    Exits with 1 if part of the store is damaged; FILE then contains the undamaged part.
    """
    with errors_as_messages():
        found = stores.backup(url, file, instances=instances or None)
    size = file.stat().st_size
    end(found, f"Backed up to {file}, {size} bytes.", as_json, file=str(file), size_bytes=size)


@store.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("url")
@instances_option
@click.option(
    "--force",
    is_flag=True,
    help="Restore even if a process uses the store, or may use it. Restart that process afterwards.",
)
@json_option
def restore(file: Path, url: str, instances: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Replace the records in the store at URL by the backup FILE, which may be of another kind of store."""
    with errors_as_messages():
        found = stores.restore(file, url, instances=instances or None, force=force)
    end(found, "Restored. Start the instance on this store.", as_json)


@store.command()
@click.argument("place", metavar="URL|FILE", callback=_stored)
@json_option
def check(place: str, as_json: bool) -> None:
    """List what is damaged or missing in a store or in a backup, and what to do about it. Changes nothing.

    Exits with 1 if anything is damaged or missing.
    """
    with errors_as_messages():
        found = stores.check(place)
    end(found, "", as_json)


@store.command(name="list")
@click.argument("place", metavar="URL|FILE", callback=_stored)
@json_option
def list_(place: str, as_json: bool) -> None:
    """List the instances in a store or in a backup, and what is deployed in them."""
    with errors_as_messages():
        found = stores.check(place)
    if as_json:
        print_json(
            {
                name: {"epoch": each.epoch, "deployments": each.deployments}
                for name, each in found.instances.items()
            }
        )
        return
    rows = [
        (name, str(each.epoch), tag, version)
        for name, each in found.instances.items()
        for tag, version in (each.deployments or {"": ""}).items()
    ]
    head = ("instance", "epoch", "deployment", "version")
    click.echo(table(head, rows) if rows else "No instances.")


@store.command()
@click.argument("url")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def repair(url: str, yes: bool, as_json: bool) -> None:
    """Make a store with missing records usable again, if there is no backup."""
    if not yes:
        click.confirm(f"Missing records of {url} will be given up. Continue?", abort=True, err=as_json)
    with errors_as_messages():
        missing = stores.repair(url)
    if as_json:
        print_json({"place": url, "given_up": missing})
        return
    click.echo("\n".join(f"Given up: {each}." for each in missing) or "Nothing was missing.")


def end(found: stores.StoreReport, text: str, as_json: bool, **more: Any) -> None:
    """Print a report, and exit with 1 if it reports damage; JSON also contains these extra values."""
    if as_json:
        print_json({"is_sound": found.is_sound, **dataclasses.asdict(found), **more})
    else:
        click.echo("\n".join(filter(None, (str(found), text))))
    if not found.is_sound:
        click.get_current_context().exit(ExitCode.FAILED)


@click.command(name="rewrite-store")
@instance_options
@json_option
def rewrite_store(at: InstanceAddress, as_json: bool) -> None:
    """Rewrite all records of the instance on a cluster after its store was removed, moved or replaced."""
    with connected(at) as client:
        count = client.rewrite_store()
    print_json({"records": count}) if as_json else click.echo(f"{counted(count, 'record')} written.")
