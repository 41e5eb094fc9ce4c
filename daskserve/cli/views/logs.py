"""``daskserve logs``: the log records of all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import click

from daskserve.cli.completion import complete_applications
from daskserve.cli.instance import InstanceAddress, instance_options, reading
from daskserve.cli.output import json_option, print_json
from daskserve.cli.serving.process import LOG_LEVELS
from daskserve.cli.views.history import print_none_found, time_options
from daskserve.client.views.logs import LogRecord, Logs
from daskserve.common.types import name_in

#: How long one call waits for new records.
WAIT_S = 20.0
_COLOURS: Mapping[str, str] = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


@click.command()
@click.argument(
    "target", metavar="[APP[/DEPLOYMENT[#REPLICA]]]", required=False, shell_complete=complete_applications
)
@instance_options
@time_options("records")
@click.option(
    "--level",
    type=click.Choice(list(LOG_LEVELS), case_sensitive=False),
    help="Only records of this level, and of those above it.",
)
@click.option(
    "--grep",
    metavar="TEXT",
    help="Only records with this text in the message, the traceback, or the id of the request or its trace.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=1000,
    show_default=True,
    help="Maximum number of past records, the newest.",
)
@json_option
def logs(
    at: InstanceAddress,
    target: str | None,
    follow: bool,
    since: float | None,
    level: str | None,
    grep: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Show the log records of all workers that are still in memory, sorted by time.

    APP/DEPLOYMENT#REPLICA is a replica as `daskserve status` names it. With --json, prints one list; with
    --follow, one object per line. Workers that do not answer, and lost records, are reported on standard
    error.
    """
    # Either a replica's name as in the status and in log records, or its parts separated by slashes.
    place, _, replica = (target or "").partition("#")
    application, _, rest = ("" if replica and "/" not in place else place).partition("/")
    deployment, _, last = rest.partition("/")
    replica = replica or last
    application, deployment = name_in(application), name_in(deployment)
    wanted: dict[str, Any] = {
        "application": application or None,
        "deployment": deployment or None,
        "replica": replica or None,
        "level": "debug" if level == "trace" else level,
        "grep": grep,
        "limit": limit,
    }
    printed: set[str] = set()
    with reading(at) as client:
        found = client.logs(**wanted, since_s=since)
        _show(found, as_json=as_json, is_stream=follow)
        _print_problems(found, printed)
        if application and not found.records:
            print_none_found(client, application, f"records of {target!r}")
        while follow:
            found = client.logs(**wanted, after=found.next, wait_s=WAIT_S)
            _show(found, as_json=as_json, is_stream=True)
            _print_problems(found, printed)


def _show(found: Iterable[LogRecord], *, as_json: bool, is_stream: bool) -> None:
    if as_json and not is_stream:
        print_json([asdict(each) for each in found])
        return
    for each in found:
        if as_json:
            print_json(asdict(each), is_line=True)
        else:
            click.secho(str(each), fg=_COLOURS.get(each.level))


def _print_problems(found: Logs, printed: set[str]) -> None:
    """Print each note about missing records once."""
    notes = [f"Worker {worker} is missing: {reason}." for worker, reason in found.missing.items()]
    for worker, losses in found.dropped.items():
        counts = ", ".join(f"{count} ({reason})" for reason, count in losses.items())
        notes.append(f"Worker {worker} has lost log records: {counts}.")
    for worker, problems in found.problems.items():
        notes += [f"Worker {worker} cannot write {problem}." for problem in problems]
    for each in notes:
        if each not in printed:
            printed.add(each)
            click.secho(each, fg="yellow", err=True)
