"""``daskserve run``: serve an application from a shell."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

import click
import dask.config

from daskserve.cli.instance import address_option
from daskserve.cli.output import errors_as_messages
from daskserve.client.definitions.targets import factory_application
from daskserve.client.hosting.hosting import HostingMode, host
from daskserve.client.verbs.applications import RunTarget
from daskserve.common.types import DEFAULT_APPLICATION
from daskserve.options.http import HTTPOptions

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


def parsed(arguments: tuple[str, ...]) -> Mapping[str, str]:
    """Return the arguments of a builder."""
    pairs = [each.partition("=") for each in arguments]
    for key, equals, _ in pairs:
        if not equals or not key:
            raise click.UsageError(f"Write arguments of a builder as KEY=VALUE, got {key + equals!r}.")
    return {key: value for key, _, value in pairs}


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
