"""``daskserve tasks``: the task queues of an instance or of a config."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click

from daskserve.cli.instance import InstanceAddress, connected, instance_options
from daskserve.cli.output import coloured, json_option, options, print_json
from daskserve.client.views.table import table

STATES = ("PENDING", "STARTED", "RETRY", "SUCCESS", "FAILURE", "REVOKED", "REJECTED")


@click.group()
def tasks() -> None:
    """List and show tasks in queues, cancel them, and queue them again.

    QUEUE is the name of a queue that the instance keeps, or the import path of a TaskProcessorConfig or of a
    task_consumer, such as mail:queue, for any queue of daskserve's own.
    """


queue_options = options(
    click.option(
        "-d", "--app-dir", default=".", show_default=True, help="Folder in which modules are found, too."
    ),
    instance_options,
    json_option,
)


def _opened(at: InstanceAddress, queue: str, app_dir: str) -> Any:
    from daskserve.client.functions.task_admin import opened_queue

    sys.path.insert(0, os.path.abspath(app_dir))
    return opened_queue(queue, partial(connected, at))


@tasks.command(name="list")
@click.argument("queue", required=False)
@click.option("--state", type=click.Choice(STATES), multiple=True, help="Only tasks in these states.")
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=100, show_default=True, help="How many tasks."
)
@queue_options
def list_(
    at: InstanceAddress, queue: str | None, state: tuple[str, ...], limit: int, app_dir: str, as_json: bool
) -> None:
    """List the queues of the instance with the numbers of their tasks, or the tasks of QUEUE."""
    from daskserve.client.functions.task_admin import queue_counts

    if queue is None:
        rows = queue_counts(partial(connected, at))
    else:
        with _opened(at, queue, app_dir) as admin:
            rows = admin.tasks(state or STATES, limit)
    if as_json:
        print_json(rows)
        return
    if queue is None:
        cells = [
            (each["queue"], *(str(each[state]) for state in STATES), f"{each['oldest_s']:.0f}")
            for each in rows
        ]
        click.echo(coloured(table(("QUEUE", *STATES, "OLDEST_S"), cells)) if cells else "No tasks.")
        return
    cells = [
        (each["id"], each["task"], each["status"], str(each["attempts"]), _time(each["due_at"]))
        for each in rows
    ]
    click.echo(coloured(table(("ID", "TASK", "STATUS", "ATTEMPTS", "DUE"), cells)) if cells else "No tasks.")


@tasks.command()
@click.argument("queue")
@click.argument("id")
@queue_options
def show(at: InstanceAddress, queue: str, id: str, app_dir: str, as_json: bool) -> None:
    """Show a task of QUEUE, with its result or its error."""
    with _opened(at, queue, app_dir) as admin:
        found = admin.show(id)
    if as_json:
        print_json(found)
        return
    for key, value in found.items():
        if value is None or value == "" or key == "traceback":
            continue
        shown = _time(value) if key.endswith("_at") else value
        click.echo(coloured(f"{key}: {shown}"))
    if found["traceback"]:
        click.echo(f"\n{found['traceback']}")


@tasks.command()
@click.argument("queue")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@queue_options
def cancel(at: InstanceAddress, queue: str, ids: tuple[str, ...], app_dir: str, as_json: bool) -> None:
    """Cancel tasks of QUEUE: waiting tasks at once, running async tasks within a second.

    Exits with 1 if a task could not be cancelled because it had already ended.
    """
    with _opened(at, queue, app_dir) as admin:
        found = {id: admin.cancel(id) for id in ids}
    if as_json:
        print_json(found)
    else:
        for id, is_cancelled in found.items():
            click.echo(f"{id}: {'cancelled' if is_cancelled else 'has ended'}")
    if not all(found.values()):
        click.get_current_context().exit(1)


@tasks.command()
@click.argument("queue")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@queue_options
def retry(at: InstanceAddress, queue: str, ids: tuple[str, ...], app_dir: str, as_json: bool) -> None:
    """Queue tasks of QUEUE again that failed, were cancelled, or could not be run."""
    with _opened(at, queue, app_dir) as admin:
        for id in ids:
            admin.retry(id)
    _print_result(list(ids), as_json=as_json)


@tasks.command()
@click.argument("queue")
@queue_options
def requeue(at: InstanceAddress, queue: str, app_dir: str, as_json: bool) -> None:
    """Queue again all tasks of QUEUE that failed permanently or could not be run."""
    with _opened(at, queue, app_dir) as admin:
        ids = admin.requeue()
    _print_result(ids, as_json=as_json)


def _print_result(ids: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json(ids)
    else:
        click.echo(f"{len(ids)} {'task is' if len(ids) == 1 else 'tasks are'} queued again.")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
