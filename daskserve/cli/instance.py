"""The options that select a running instance, and how commands find it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import dask.config

from daskserve.cli.output import CommandError, ExitCode, errors_as_messages
from daskserve.client.client import Client
from daskserve.client.definitions.specs import check_name
from daskserve.client.functions.discovery import connect, unanswered
from daskserve.common.types import name_in
from daskserve.errors import ServeError, UnavailableError

#: Time within which a controller answers a command that changes nothing.
ANSWER_S = 3.0


def checked_name(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the name of an instance, as the callback of its option."""
    try:
        check_name(value, "it")
    except ServeError as error:
        raise click.BadParameter(str(error)) from None
    return value


#: The option of a Dask scheduler.
address_option = click.option(
    "-a",
    "--address",
    help="Address of a Dask scheduler, such as tcp://host:8786, or of its HTTP server, such as "
    "http://host:8787. Default: scheduler-address of Dask's configuration.",
)


@dataclass(frozen=True, slots=True)
class InstanceAddress:
    """The running instance that a command's options select."""

    address: str | None
    name: str | None


def instance_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select a running instance to a command, which gets an `InstanceAddress`.

    Errors of the command are shown as messages; see `errors_as_messages`.
    """

    @functools.wraps(command)
    def gathered(*args: Any, address: str | None, name: str | None, **values: Any) -> Any:
        with errors_as_messages():
            return command(*args, InstanceAddress(address, name), **values)

    named = click.option(
        "--instance",
        "name",
        help="Name of the instance, if programs have several of their own on the cluster.",
    )
    return address_option(named(gathered))


@contextmanager
def connected(at: InstanceAddress) -> Iterator[Client]:
    """Yield a client of a running instance, and disconnect it afterwards.

    Raises
    ------
    NotRunningError
        No instance runs there, or none of this name. The exit code of the command is 3.
    """
    client = connect(address=known(at.address), name=at.name)
    try:
        yield client
    finally:
        client.disconnect()


@contextmanager
def reading(at: InstanceAddress) -> Iterator[Client]:
    """Yield a client for a command that changes nothing: it fails soon if the controller does not answer.

    Other commands wait longer, because a controller is replaced within seconds.

    Raises
    ------
    CommandError
        The controller does not answer. The message contains what the scheduler knows about it; the exit code
        is 3.
    """
    with connected(at) as client:
        try:
            client.controller_health(ANSWER_S)
        except UnavailableError as error:
            text = unanswered(known(at.address), client.instance_name, ANSWER_S)
            raise CommandError(text, ExitCode.NOT_RUNNING, type(error).__name__) from error
        yield client


def known(address: str | None) -> str:
    """Return the address of the scheduler, from the command line or Dask's configuration."""
    found: str | None = address or dask.config.get("scheduler-address", None)
    if found is None:
        raise click.UsageError(
            "Give --address, or set scheduler-address in Dask's configuration (DASK_SCHEDULER_ADDRESS)."
        )
    return found


def split_target(target: str) -> tuple[str, str | None]:
    """Return the application and the deployment of ``APP`` or ``APP/DEPLOYMENT``.

    A slash within a name is written as the status shows it: ``a%2Fb/model`` is the
    deployment ``model`` of the application ``a/b``.
    """
    application, _, deployment = target.partition("/")
    return name_in(application), name_in(deployment) or None
