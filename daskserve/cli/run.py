"""``daskserve run``, ``status`` and ``shutdown``: serve an application from a shell."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

import click
import dask.config
from pydantic import ValidationError

from daskserve.client.client import Client
from daskserve.client.definitions.targets import factory_application
from daskserve.client.functions.finding import connect
from daskserve.client.hosting.hosting import HostingMode, host
from daskserve.client.verbs.applications import RunTarget
from daskserve.client.views.status import Status
from daskserve.common.types import DEFAULT_APPLICATION
from daskserve.errors import NotRunningError, ReplicaStartError, ServeError
from daskserve.options.http import HTTPOptions
from daskserve.options.specs import deployment_tag
from daskserve.payload.shown_errors import shortened

#: The HTTP options that the command has.
HTTP_OPTIONS = ("host", "port", "server", "root_path", "ssl_certfile", "ssl_keyfile", "request_timeout_s")
#: Options of uvicorn that the command does not have, with what to do instead.
UVICORN_OPTIONS: Mapping[str, str] = {
    "--reload": "run the command again, with --replace while it serves on a cluster.",
    "--workers": "the number of replicas belongs to the deployment, "
    "serve.deployment('module:app').options(num_replicas=4, isolation='process').bind().",
    "--proxy-headers": "name the addresses in http_options={'trusted_forwarders': [...]} of serve.start().",
    "--log-level": "configure Python's logging in the application.",
}


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


class RunCommand(click.Command):
    """A command that says what to write instead of uvicorn's options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in UVICORN_OPTIONS:
                raise
            raise click.UsageError(
                f"No such option {error.option_name}: {UVICORN_OPTIONS[error.option_name]}", ctx
            ) from None


@click.command(cls=RunCommand)
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
    help="Serve until Ctrl-C, or deploy the application, or a new version of it, and leave it running.",
)
@click.option(
    "--replace",
    is_flag=True,
    help="Replace an application of this name that runs already. The new version stays.",
)
@click.option(
    "--restore",
    is_flag=True,
    help="Replace it until Ctrl-C, and then give the old version back.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0, min_open=True),
    help="Time in seconds after which a change that is not complete is rolled back.",
)
def run(
    target: str,
    arguments: tuple[str, ...],
    name: str,
    route_prefix: str,
    factory: bool,
    address: str | None,
    blocking: bool,
    replace: bool,
    restore: bool,
    timeout_s: float | None,
    **http: Any,
) -> None:
    """Serve the application TARGET, given as module:name, until Ctrl-C.

    TARGET is a FastAPI, Starlette or other ASGI application, what .bind() returns, or a function that builds
    one of these from the arguments KEY=VALUE. Modules are found in the current directory, too.

    Without --address, a local Dask cluster is started, which ends with the command. Its worker imports the
    module, and the port opens once the application is up. With --address, the workers must be able to import
    the module. The command ends what it has started: the application, and the instance if none ran there and
    no other program uses it. What it only changes keeps running. If it fails, or is interrupted before the
    application is up, everything stays as it was.
    """
    if target.endswith((".yaml", ".yml", ".json")):
        raise click.ClickException(
            f"TARGET is the file {target!r}, but there are no configuration files. Give an import path, such "
            "as module:app."
        )
    if restore and not blocking:
        raise click.UsageError("--restore gives the old version back when the command ends; add --blocking.")
    sys.path.insert(0, os.getcwd())
    given = {key: value for key, value in http.items() if value is not None}
    with errors_as_messages(), sigterm_as_interrupt():
        pairs = parsed(arguments)
        host(
            RunTarget(factory_application(target), name, route_prefix)
            if factory
            else RunTarget(target, name, route_prefix, pairs),
            given,
            address=address or dask.config.get("scheduler-address", None),
            stay=HostingMode(blocking, replace, restore),
            report=click.echo,
            timeout_s=timeout_s,
        )


def instance_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select a running instance to a command."""
    named = click.option(
        "--instance",
        "name",
        help="Name of the instance, if programs have several of their own on the cluster.",
    )
    return address_option(named(command))


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


def is_terminal() -> bool:
    """Return whether standard input is a terminal."""
    return sys.stdin.isatty()


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


def tell(address: str | None, name: str | None, text_of: Callable[[Client], str]) -> None:
    """Print a text about the instance on a cluster, or that none runs there."""
    with errors_as_messages():
        client = running(known(address), name)
        if client is None:
            click.echo(str(Status()))
            return
        try:
            click.echo(text_of(client))
        finally:
            client.disconnect()


def running(address: str, name: str | None) -> Client | None:
    """Return a client of the instance on a cluster; None if none runs there, and none is named."""
    try:
        return connect(address=address, name=name)
    except NotRunningError:
        if name is not None:
            raise
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
    """Show errors that say what to do without a traceback, and with the options of the command."""
    try:
        yield
    except ReplicaStartError as error:
        text = f"{spelled(str(error))}\n\n{shortened(error.user_traceback)}"
        raise click.ClickException(text.rstrip()) from error
    except (ServeError, ValidationError, TypeError, ValueError) as error:
        raise click.ClickException(spelled(str(error))) from error


def spelled(text: str) -> str:
    """Return a message that names arguments of Python functions with the options of this command instead."""
    for each in click.get_current_context().command.params:
        if not isinstance(each, click.Option) or each.name is None:
            continue
        option, name = max(each.opts, key=len), re.escape(each.name)
        patterns = [rf'http_options={{"{name}": \.\.\.}}', rf"(?<![\w-]){name}=(\.\.\.|(?!\w|['\"[{{(]))"]
        if "_" in each.name:
            patterns.append(rf"(?<![\w-]){name}(?![\w=])")
        text = re.sub("|".join(patterns), option, text)
    return text


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
