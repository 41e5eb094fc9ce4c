"""``daskserve history``, ``events`` and ``explain``: what happened to an instance, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import click

from daskserve.cli.completion import complete_applications
from daskserve.cli.instance import InstanceAddress, instance_options, reading, split_target
from daskserve.cli.output import coloured, json_option, print_json
from daskserve.client.client import Client
from daskserve.client.views.history import Event
from daskserve.common.types import DEFAULT_APPLICATION
from daskserve.options.specs import deployment_tag

#: How long one call waits for new events.
WAIT_S = 20.0
_UNITS: Mapping[str, float] = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def as_seconds(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """Return a time such as ``90s``, ``15m``, ``2h`` or ``1d`` in seconds."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", value.strip())
    if found is None:
        raise click.BadParameter(f"{value!r} is not a time; write it as 90s, 15m, 2h or 1d.")
    return float(found[1]) * _UNITS[found[2] or "s"]


def time_options(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options for selecting ``what`` by time to a command."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        follow = click.option("-f", "--follow", is_flag=True, help=f"Show new {what}, too, until Ctrl-C.")
        text = f"Only {what} of this time, such as 90s, 15m or 2h."
        return follow(click.option("--since", callback=as_seconds, help=text)(command))

    return decorated


@click.command()
@click.argument(
    "application", metavar="[APP]", default=DEFAULT_APPLICATION, shell_complete=complete_applications
)
@instance_options
@json_option
def history(at: InstanceAddress, application: str, as_json: bool) -> None:
    """Show the last ten revisions of an application: who, when, what changed, and how it ended."""
    with reading(at) as client:
        found = client.history(application)
    if as_json:
        print_json(asdict(found))
    else:
        click.echo(coloured(str(found)))


@click.command()
@click.argument("application", metavar="[APP]", required=False, shell_complete=complete_applications)
@instance_options
@time_options("events")
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    help="Maximum number of past events, the newest.",
)
@json_option
def events(
    at: InstanceAddress, application: str | None, follow: bool, since: float | None, limit: int, as_json: bool
) -> None:
    """Show what happened to the instance, or to APP, and why.

    With --json, prints one list; with --follow, one object per line.
    """
    with reading(at) as client:
        found = client._events(application, since_s=since, limit=limit)
        _show(found.events, as_json=as_json, is_stream=follow)
        if application is not None and not found.events:
            print_none_found(client, application, f"events of {application!r}")
        while follow:
            found = client._events(application, after=found.next, wait_s=WAIT_S)
            _show(found.events, as_json=as_json, is_stream=True)


def print_none_found(client: Client, application: str, what: str) -> None:
    """Print on standard error that an application has no entries, and whether it runs."""
    known = client.status().applications
    text = f"There are no such {what}."
    if application not in known:
        names = ", ".join(sorted(known)) or "none"
        text = f"There are no such {what}, and no application {application!r}; there are: {names}."
    click.secho(text, fg="yellow", err=True)


def _show(found: Iterable[Event], *, as_json: bool, is_stream: bool) -> None:
    if as_json and not is_stream:
        print_json([asdict(each) for each in found])
        return
    for each in found:
        print_json(asdict(each), is_line=True) if as_json else click.echo(str(each))


@click.command()
@click.argument("target", metavar="APP[/DEPLOYMENT]", shell_complete=complete_applications)
@instance_options
@json_option
def explain(at: InstanceAddress, target: str, as_json: bool) -> None:
    """Explain the number of replicas of a deployment, or of all deployments of an application."""
    application, deployment = split_target(target)
    with reading(at) as client:
        if deployment is not None:
            names = [deployment]
        else:
            names = sorted(client.status().only(application).applications[application].deployments)
        found = {each: client.explain(deployment_tag(application, each)) for each in names}
    if as_json:
        plain = {each: asdict(explanation) for each, explanation in found.items()}
        print_json(plain if deployment is None else plain[deployment])
    else:
        click.echo("\n\n".join(map(str, found.values())))
