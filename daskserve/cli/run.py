"""``daskserve run``, ``status`` and ``shutdown``: serve an application from a shell."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

import click
import dask.config
from pydantic import ValidationError

from daskserve.client.api import connect
from daskserve.client.application_verbs import RunTarget
from daskserve.client.client import Client
from daskserve.client.hosting import host
from daskserve.client.status import Status
from daskserve.client.targets import application_of, factory_application
from daskserve.errors import NotRunningError, ReplicaStartError, ServeError
from daskserve.options.http import HTTPOptions
from daskserve.types import DEFAULT_APPLICATION

#: The HTTP options that the command has.
HTTP_OPTIONS = ("host", "port", "server", "root_path", "ssl_certfile", "ssl_keyfile", "request_timeout_s")


def address_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option of a Dask scheduler to a command."""
    return click.option(
        "-a",
        "--address",
        help="Address of a Dask scheduler, such as tcp://host:8786. Default: scheduler-address of Dask's "
        "configuration.",
    )(command)


def http_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `HTTPOptions` to a command."""
    for name in reversed(HTTP_OPTIONS):
        field = HTTPOptions.model_fields[name]
        kinds = [each for each in (field.annotation, *get_args(field.annotation)) if each in (int, float)]
        is_choice = get_origin(field.annotation) is Literal
        command = click.option(
            f"--{name.replace('_', '-')}",
            name,
            type=click.Choice(get_args(field.annotation)) if is_choice else next(iter(kinds), str),
            help=f"{(field.description or '').replace('``', '')} Default: {field.default!r}.",
        )(command)
    return command


@click.command()
@click.argument("target")
@click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--name", default=DEFAULT_APPLICATION, show_default=True, help="Name of the application.")
@click.option("--route-prefix", default="/", show_default=True, help="Path prefix for its HTTP requests.")
@click.option(
    "--factory",
    is_flag=True,
    help="Call TARGET, without arguments, in each replica to build the application.",
)
@address_option
@http_options
@click.option(
    "--blocking/--non-blocking",
    default=True,
    show_default=True,
    help="Serve until Ctrl-C, or leave the application running.",
)
def run(
    target: str,
    arguments: tuple[str, ...],
    name: str,
    route_prefix: str,
    factory: bool,
    address: str | None,
    blocking: bool,
    **http: Any,
) -> None:
    """Serve the application TARGET, given as module:name, until Ctrl-C.

    TARGET is a FastAPI, Starlette or other ASGI application, what .bind() returns, or a function that builds
    one of these from the arguments KEY=VALUE. Modules are found in the current directory, too.

    Without --address, a local Dask cluster is started, which ends with the command. With it, the workers must
    be able to import the module.
    """
    sys.path.insert(0, os.getcwd())
    given = {key: value for key, value in http.items() if value is not None}
    with errors_as_messages(), sigterm_as_interrupt():
        found = factory_application(target) if factory else application_of(target, parsed(arguments))
        host(
            RunTarget(found, name, route_prefix),
            given,
            address=address or dask.config.get("scheduler-address", None),
            is_blocking=blocking,
            report=click.echo,
        )


@click.command()
@address_option
def status(address: str | None) -> None:
    """Show what runs on a cluster, and why the rest does not."""
    tell(address, lambda client: str(client.status()))


@click.command()
@address_option
@click.option("-y", "--yes", is_flag=True, help="Accepted for compatibility: nothing is asked.")
def shutdown(address: str | None, yes: bool) -> None:
    """End the instance on a cluster, with all its applications."""
    with errors_as_messages():
        client = running(known(address))
        if client is None:
            click.echo(str(Status()))
        else:
            client.shutdown()


@click.command(name="rewrite-store")
@address_option
def rewrite_store(address: str | None) -> None:
    """Write all records of the instance on a cluster anew, after its store was removed, moved or replaced."""
    tell(address, lambda client: f"{client.rewrite_store()} records written.")


def tell(address: str | None, text_of: Callable[[Client], str]) -> None:
    """Print a text about the instance on a cluster, or that none runs there."""
    with errors_as_messages():
        client = running(known(address))
        if client is None:
            click.echo(str(Status()))
            return
        try:
            click.echo(text_of(client))
        finally:
            client.disconnect()


def running(address: str) -> Client | None:
    """Return a client of the instance on a cluster; None if none runs there."""
    try:
        return connect(address=address)
    except NotRunningError:
        return None


def known(address: str | None) -> str:
    """Return the address of the scheduler, from the command line or Dask's configuration."""
    found: str | None = address or dask.config.get("scheduler-address", None)
    if found is None:
        raise click.UsageError(
            "Give --address, or set scheduler-address in Dask's configuration (DASK_SCHEDULER_ADDRESS)."
        )
    return found


def parsed(arguments: tuple[str, ...]) -> Mapping[str, str]:
    """Return the arguments of a builder."""
    pairs = [each.partition("=") for each in arguments]
    for key, equals, _ in pairs:
        if not equals or not key:
            raise click.UsageError(f"Write arguments of a builder as KEY=VALUE, got {key + equals!r}.")
    return {key: value for key, _, value in pairs}


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Show errors that say what to do without a traceback."""
    try:
        yield
    except ReplicaStartError as error:
        raise click.ClickException(f"{error}\n\n{error.user_traceback}".rstrip()) from error
    except (ServeError, ValidationError) as error:
        raise click.ClickException(str(error)) from error
    except (TypeError, ValueError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not frame.f_globals["__name__"].startswith("daskserve."):
            raise  # the user's code has raised it
        raise click.ClickException(str(error)) from error


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does, also while it starts."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = {each: signal.signal(each, interrupt) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
