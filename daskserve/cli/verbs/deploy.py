"""``daskserve deploy``, ``diff`` and ``config``: configurations of instances."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import click

from daskserve.cli.completion import complete_files
from daskserve.cli.instance import InstanceAddress, connected, instance_options, known, reading
from daskserve.cli.output import (
    CommandError,
    ExitCode,
    FiniteRange,
    coloured,
    json_option,
    options,
    print_json,
)
from daskserve.cli.serving.run import parsed
from daskserve.cli.serving.targets import check_file_options, read_file
from daskserve.client.client import Client
from daskserve.client.functions.http_differences import differences
from daskserve.client.functions.instances import start
from daskserve.client.views.plan import Plan
from daskserve.common import settings
from daskserve.common.types import DEFAULT_APPLICATION
from daskserve.config_file.model import ApplicationConfig, InstanceConfig
from daskserve.config_file.reading import in_force, is_config_file, read
from daskserve.config_file.writing import to_yaml, without_places
from daskserve.errors import NotRunningError
from daskserve.loops.blocking import finish

#: Number of applications that `deploy --wait` names at a time.
MAX_SHOWN = 10
#: The colours of signs at the beginning of a line of a plan.
_COLOURS: Mapping[str, str] = {"+": "green", "-": "red", "!": "red", "~": "yellow"}


@dataclass(frozen=True, slots=True)
class Declaration:
    """The configuration that a command's target declares, and its origin."""

    config: InstanceConfig
    warnings: list[str]
    source: str


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a command as it was given: a file or an import path, and its options."""

    target: str
    arguments: tuple[str, ...]
    application: str
    route_prefix: str
    merge: bool

    def read(self) -> Declaration:
        """Return the target's configuration; see `declaration`."""
        return declaration(self.target, self.arguments, self.application, self.route_prefix)

    @property
    def merges(self) -> bool:
        """Whether applications that the target does not name are kept; always true for an import path."""
        return self.merge or not (self.target == "-" or is_config_file(self.target))


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the target of a command, and its options; the command gets them as a `Target`."""

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        target = Target(**{each.name: values.pop(each.name) for each in fields(Target)})
        return command(target, **values)

    add = options(
        click.argument("target", shell_complete=complete_files),
        click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]..."),
        click.option(
            "--name",
            "application",
            default=DEFAULT_APPLICATION,
            show_default=True,
            help="Name of the application, if TARGET is an import path.",
        ),
        click.option(
            "--route-prefix",
            default="/",
            show_default=True,
            help="Path prefix of its HTTP requests, if TARGET is an import path.",
        ),
        click.option(
            "--merge",
            is_flag=True,
            help=(
                "Keep everything that the file does not name. Default: applications of an earlier file "
                "that this file does not name are deleted."
            ),
        ),
    )
    return add(gathered)


def declaration(target: str, arguments: tuple[str, ...], application: str, route_prefix: str) -> Declaration:
    """Return the configuration of a target: a file, ``-`` for standard input, or an import path."""
    if target == "-" or is_config_file(target):
        check_file_options(target, arguments)
        found = read(sys.stdin.read(), "-") if target == "-" else read_file(target)
        return Declaration(found.config, found.warnings, "standard input" if target == "-" else target)
    one = ApplicationConfig(
        name=application, import_path=target, route_prefix=route_prefix, args=dict(parsed(arguments))
    )
    return Declaration(InstanceConfig(applications=[one]), [], target)


@click.command()
@target_options
@instance_options
@click.option("--dry-run", is_flag=True, help="Show what it would change, and change nothing.")
@click.option("--wait", is_flag=True, help="Return once all applications run, or have failed.")
@click.option(
    "--timeout-s",
    type=FiniteRange(0, min_open=True),
    help="With --wait: how long, in seconds. The deploy then continues.",
)
@click.option("--version", metavar="GIT_SHA", default="", help="Version of the file, for the history.")
@json_option
def deploy(
    target: Target,
    at: InstanceAddress,
    dry_run: bool,
    wait: bool,
    timeout_s: float | None,
    version: str,
    as_json: bool,
) -> None:
    """Deploy TARGET: a configuration file (YAML, JSON or TOML; - is standard input), or an import path.

    Shows what changes, and returns as soon as the instance has accepted it: exit code 0. If no instance runs,
    the command starts a detached one, with the file's HTTP options. If an application cannot be built,
    nothing changes: exit code 1. The workers must be able to import the applications.

    An import path is handled like a file with one application, with --merge.
    """
    wanted = target.read()
    _warn(wanted.warnings)
    with _instance_for(at, wanted.config, may_start=not dry_run) as client:
        plan = client.plan_config(wanted.config, merge=target.merges)
        _show(plan, as_json=as_json and (dry_run or bool(plan.failed)))
        if plan.failed:
            raise _not_built(plan, "Nothing was changed.")
        if dry_run:
            return
        number = client.deploy_config(
            wanted.config,
            merge=target.merges,
            expected_version=plan.version,
            source=wanted.source,
            version=version,
        )
        found: dict[str, Any] = {"version": number, "plan": plan.to_plain()}
        if wait:
            found["applications"] = client.wait_for_config(
                number, timeout_s=timeout_s, on_wait=_print_waiting
            )
        _print_result(found, as_json=as_json)


def _print_waiting(waiting: Mapping[str, str]) -> None:
    for name, why in list(waiting.items())[:MAX_SHOWN]:
        first = why.partition("\n")[0]
        click.echo(f"{name} waits: {first}", err=True)
    if len(waiting) > MAX_SHOWN:
        click.echo(f"... and {len(waiting) - MAX_SHOWN} more applications", err=True)


def _print_result(found: dict[str, Any], *, as_json: bool) -> None:
    """Print how a deploy has ended, and exit with 1 if an application has failed."""
    apps = found.get("applications", {})
    failed = {name: each["message"] for name, each in apps.items() if each["status"] == "DEPLOY_FAILED"}
    if as_json:
        print_json(found)
    else:
        click.echo(f"Version {found['version']} is accepted.")
        for name, each in apps.items():
            click.echo(coloured(f"{name}: {each['status']}"))
    if failed:
        text = "\n".join(f"Application {name!r} failed: {why}" for name, why in failed.items())
        raise CommandError(text, ExitCode.FAILED, "DeployError")


@click.command()
@target_options
@instance_options
@click.option("--exit-code", is_flag=True, help="Exit with 4 if there are changes.")
@json_option
def diff(target: Target, at: InstanceAddress, exit_code: bool, as_json: bool) -> None:
    """Show what `daskserve deploy TARGET` would change: what restarts, what is reconfigured, what is deleted.

    A worker builds the applications for the comparison. If one cannot be built, the exit code is 1.
    """
    wanted = target.read()
    _warn(wanted.warnings)
    with reading(at) as client:
        plan = client.plan_config(wanted.config, merge=target.merges)
        _warn_of_http(client, wanted.config)
    _show(plan, as_json=as_json)
    if plan.failed:
        raise _not_built(plan)
    if exit_code and plan.has_changes:
        click.get_current_context().exit(ExitCode.CHANGES)


@click.command()
@instance_options
@click.option("-n", "--name", "application", metavar="APP", help="Show only this application.")
@json_option
def config(at: InstanceAddress, application: str | None, as_json: bool) -> None:
    """Show the configuration that was deployed, as a file that can be deployed again with the same result.

    References to variables and secrets are shown as they are. Applications that programs deployed are not
    included; see `daskserve build`.
    """
    with reading(at) as client:
        found = client.get_config(application)
    apps = [each["config"] for each in found["applications"].values()]
    whole = without_places({**({} if application else found["instance"]), "applications": apps})
    if as_json:
        print_json(whole)
    else:
        click.echo(to_yaml(whole), nl=False)


@contextmanager
def _instance_for(at: InstanceAddress, config: InstanceConfig, *, may_start: bool) -> Iterator[Client]:
    """Yield a client of the running instance, or of a new one if one may be started."""
    with ExitStack() as stack:
        try:
            client = stack.enter_context(connected(at))
        except NotRunningError:
            if at.name is not None:
                raise
            if not may_start:
                text = "No instance runs there, so everything would be new. Deploy without --dry-run."
                raise NotRunningError(text) from None
            client = stack.enter_context(_started(at, config))
        else:
            _warn_of_http(client, config)
        yield client


@contextmanager
def _started(at: InstanceAddress, config: InstanceConfig) -> Iterator[Client]:
    """Start a detached instance with the HTTP options of a configuration, and yield its client."""
    whole = in_force(config, settings.process_variables())
    client = start(
        detached=True,
        address=known(at.address),
        http_options=dict(whole.http_options),
        proxy_location=whole.proxy_location,
    )
    try:
        click.echo(f"Started instance {client.instance_name!r}: {', '.join(client.http_urls())}", err=True)
        yield client
    finally:
        client.disconnect()


def _warn_of_http(client: Client, config: InstanceConfig) -> None:
    """Warn about HTTP options that are not in force, because they only apply when an instance starts."""
    given = in_force(config, settings.process_variables()).http_options
    found = finish(differences(client._verbs, given)) if given else ""
    if found:
        _warn([f"HTTP options act when the instance starts; in force, {found}."])


def _warn(warnings: list[str]) -> None:
    for each in warnings:
        click.secho(f"Warning: {each}", err=True, fg="yellow")


def _not_built(plan: Plan, more: str = "") -> CommandError:
    names = ", ".join(map(repr, plan.failed))
    return CommandError(f"Cannot be deployed: {names}. {more}".rstrip(), ExitCode.FAILED, "DeployError")


def _show(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        print_json(plan.to_plain())
        return
    if click.get_current_context().params.get("as_json"):
        return
    for line in str(plan).splitlines():
        click.secho(line, fg=_COLOURS.get(line.strip()[:1]))
