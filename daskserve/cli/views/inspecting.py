"""``daskserve profile`` and ``stacks``: what the code of a replica does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from daskserve.cli.instance import InstanceAddress, instance_options, reading
from daskserve.cli.output import FiniteRange, json_option, print_json, writing
from daskserve.client.views.profile import Profile

_FORMATS: Mapping[str, Callable[[Profile], str]] = {
    "text": lambda found: f"{found}\n",
    "html": Profile.to_html,
    "svg": Profile.to_svg,
    "json": lambda found: json.dumps(found.values) + "\n",
    "collapsed": Profile.to_collapsed,
}


@click.command()
@click.argument("replica")
@instance_options
@click.option(
    "--seconds",
    type=FiniteRange(0, 60, min_open=True),
    default=5.0,
    show_default=True,
    help="How long to look.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(list(_FORMATS)),
    help="Default: by the ending of the file, else text.",
)
@click.option("--memory", is_flag=True, help="Find the lines that hold memory instead, by tracemalloc.")
@click.option("--stack", is_flag=True, help="Show what the code does now, as `daskserve stacks`.")
@json_option
def profile(
    at: InstanceAddress,
    replica: str,
    seconds: float,
    output: Path | None,
    kind: str | None,
    memory: bool,
    stack: bool,
    as_json: bool,
) -> None:
    """Show where the code of REPLICA spends its time: functions and lines, or a flame graph.

    REPLICA is a replica as `daskserve status` shows it, or a deployment, which stands for its busiest
    replica. The file name of a flame graph ends with .html, which can be zoomed and searched, or .svg.
    """
    if stack:
        if output is not None or memory or kind is not None:
            raise click.UsageError(
                "--stack cannot be combined with --output, --format or --memory; leave them out."
            )
        _show_stacks(at, replica, is_full=False, as_json=as_json)
        return
    ending = "" if output is None else output.suffix.removeprefix(".")
    kind = kind or ("json" if as_json else ending if ending in _FORMATS else "text")
    if memory and kind in ("svg", "collapsed"):
        raise click.UsageError(f"A memory profile has no stacks; leave out --memory or --format {kind}.")
    with reading(at) as client:
        found = client.profile(replica, seconds, memory=memory)
    text = _FORMATS[kind](found)
    if output is None:
        click.echo(text, nl=False)
        return
    with writing(output):
        output.write_text(text, encoding="utf-8")
    if not as_json:
        click.echo(f"{found!r}\nWritten to {output}.")


@click.command()
@click.argument("replica")
@instance_options
@click.option("--full", is_flag=True, help="Show threads and frames outside of the user's code, too.")
@json_option
def stacks(at: InstanceAddress, replica: str, full: bool, as_json: bool) -> None:
    """Show what the threads and tasks of REPLICA do now, even if they are stuck or it is still starting.

    REPLICA is a replica as `daskserve status` shows it, or a deployment, which stands for its busiest
    replica.
    """
    _show_stacks(at, replica, is_full=full, as_json=as_json)


def _show_stacks(at: InstanceAddress, replica: str, *, is_full: bool, as_json: bool) -> None:
    with reading(at) as client:
        found = client.stacks(replica)
    if as_json:
        print_json(found.values)
    else:
        click.echo(found.to_text(is_full=is_full))
