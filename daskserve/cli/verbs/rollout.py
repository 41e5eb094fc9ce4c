"""``daskserve rollout``: look at a rollout, pause, promote or abort it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from daskserve.cli.completion import complete_applications
from daskserve.cli.instance import InstanceAddress, connected, instance_options, reading, split_target
from daskserve.cli.output import ExitCode, coloured, json_option, options, print_json
from daskserve.client.client import Client
from daskserve.common.formatting import counted, shown

#: The states in which the new version was rolled back.
UNDONE = ("ROLLED_BACK", "ABORTED")


@click.group()
def rollout() -> None:
    """Look at the rollout of a new version, pause, promote or abort it.

    A deployment is named APP/DEPLOYMENT, or DEPLOYMENT alone in the default application; APP alone is the
    ingress of that application. With --model, it is the rollout of a model of its model_repository.
    """


_target = options(
    click.argument("target", metavar="APP[/DEPLOYMENT]", shell_complete=complete_applications),
    click.option("--model", metavar="NAME", default="", help="Name of a model of the deployment."),
    instance_options,
    json_option,
)


@rollout.command()
@_target
def status(at: InstanceAddress, target: str, model: str, as_json: bool) -> None:
    """Show the progress of a rollout, with the metrics of its gates, or how the last one ended.

    Exits with 1 if the new version was rolled back.
    """
    with reading(at) as client:
        found = client.rollout_status(**_named(target, model))
    _print(found, as_json)
    if found["state"] in UNDONE:
        click.get_current_context().exit(ExitCode.FAILED)


@rollout.command()
@_target
def pause(at: InstanceAddress, target: str, model: str, as_json: bool) -> None:
    """Keep a rollout at its current step; its gates still apply."""
    _show(at, as_json, lambda client: client.pause_rollout(**_named(target, model)))


@rollout.command()
@_target
@click.option("--full", is_flag=True, help="Skip all other steps.")
def promote(at: InstanceAddress, target: str, model: str, as_json: bool, full: bool) -> None:
    """Move a rollout to its next step without waiting any longer."""
    _show(at, as_json, lambda client: client.promote_rollout(**_named(target, model), full=full))


@rollout.command()
@_target
def abort(at: InstanceAddress, target: str, model: str, as_json: bool) -> None:
    """Send all traffic to the old version, and undo the change."""
    _show(at, as_json, lambda client: client.abort_rollout(**_named(target, model)))


def named(target: str) -> dict[str, str]:
    """Return the name of a deployment, and its application if the target names one."""
    application, name = split_target(target)
    return (
        {"name": application, "application": ""}
        if name is None
        else {"name": name, "application": application}
    )


def _named(target: str, model: str) -> dict[str, str]:
    return named(target) | ({"model": model} if model else {})


def _show(at: InstanceAddress, as_json: bool, verb: Callable[[Client], dict[str, Any]]) -> None:
    with connected(at) as client:
        found = verb(client)
    _print(found, as_json)


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        click.echo(coloured("\n".join(lines_of(found))))


def lines_of(found: Mapping[str, Any]) -> Iterator[str]:
    """Return the lines that show the state of a rollout."""
    what = found["deployment"] + (f", model {found['model']}" if "model" in found else "")
    yield f"{what}: version '{found['version']}' beside '{found['stable']}': {found['state']}"
    if found["why"]:
        yield f"  {found['why']}"
    if "steps" not in found:
        return
    steps, share = found["steps"], shown(100 * found["share"])
    yield f"  step {found['step']} of {len(steps)} ({' -> '.join(steps)}), {share} % of the traffic"
    for each in ("candidate", "stable"):
        requests = found["requests"][each]
        yield (
            f"  {each}: {counted(found['replicas'][each], 'replica')}, "
            f"{counted(requests['ended'], 'request')} at this step, "
            f"{requests['failed']} failed"
        )
    for gate in found["gates"]:
        yield f"  {gate['metric']}: {'worse' if gate['is_worse'] else 'not worse'}: {gate['text']}"
    shadowed = found["shadowed"]
    if shadowed is not None:
        compared = counted(shadowed["compared"], "answer differs", "answers differ")
        yield f"  shadowed: {shadowed['different']} of {compared}"
        if shadowed["failed"]:
            yield f"    {shadowed['failed']} could not be compared: {shadowed['trouble']}"
        yield from (f"    {each}" for each in shadowed["samples"])
    if found["waiting"]:
        yield f"  waits: {found['waiting']}"
