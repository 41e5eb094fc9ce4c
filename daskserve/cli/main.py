"""The command ``daskserve``. Commands and groups have their own modules, which are imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from daskserve._version import __version__
from daskserve.common import settings

#: The location and the help text of each command or group: ``name -> ("module:command", "help")``.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "build": ("daskserve.cli.verbs.config_file:build", "Write the configuration file of applications."),
    "completion": ("daskserve.cli.completion:completion", "Print a script for completion in a shell."),
    "config": ("daskserve.cli.verbs.deploy:config", "Show what is declared, as a file."),
    "controller-health": (
        "daskserve.cli.serving.start:controller_health",
        "Say whether the controller answers.",
    ),
    "delete": ("daskserve.cli.verbs.operate:delete", "Delete an application."),
    "deploy": ("daskserve.cli.verbs.deploy:deploy", "Deploy a configuration file or an application."),
    "diff": ("daskserve.cli.verbs.deploy:diff", "Show what a configuration file would change."),
    "docs": ("daskserve.cli.docs:docs", "Show the section of the documentation about a keyword."),
    "models": ("daskserve.cli.verbs.models:models", "List, load and unload models of a deployment."),
    "events": ("daskserve.cli.views.history:events", "Show what happened, and why."),
    "explain": ("daskserve.cli.views.history:explain", "Explain a deployment's number of replicas."),
    "history": ("daskserve.cli.views.history:history", "Show the last versions of an application."),
    "logs": ("daskserve.cli.views.logs:logs", "Show the logs of all workers, in the order of time."),
    "metrics": ("daskserve.cli.metrics.metrics:metrics", "Set up Prometheus and Grafana for daskserve."),
    "profile": (
        "daskserve.cli.views.inspecting:profile",
        "Show where the code of a replica spends its time.",
    ),
    "restart": ("daskserve.cli.verbs.operate:restart", "Restart the replicas of an application."),
    "rewrite-store": ("daskserve.cli.store:rewrite_store", "Rewrite the records of an instance."),
    "rollback": (
        "daskserve.cli.verbs.operate:rollback",
        "Deploy an earlier version of an application again.",
    ),
    "rollout": ("daskserve.cli.verbs.rollout:rollout", "Look at a rollout, pause, promote or abort it."),
    "run": ("daskserve.cli.serving.run:run", "Serve an application until Ctrl-C."),
    "scale": ("daskserve.cli.verbs.operate:scale", "Set the number of replicas of a deployment."),
    "schema": ("daskserve.cli.verbs.config_file:schema", "Print the JSON Schema of configuration files."),
    "shutdown": ("daskserve.cli.verbs.operate:shutdown", "End the instance on a cluster."),
    "simulate": ("daskserve.cli.simulate:simulate", "Try autoscaling policies on a recorded load."),
    "stacks": ("daskserve.cli.views.inspecting:stacks", "Show what the code of a replica does now."),
    "start": ("daskserve.cli.serving.start:start", "Start an instance that stays."),
    "status": ("daskserve.cli.views.status:status", "Show what runs on a cluster."),
    "store": ("daskserve.cli.store:store", "Back up, restore, check and list stores."),
    "tasks": ("daskserve.cli.verbs.tasks:tasks", "Look at queues of tasks, cancel and retry tasks."),
}


class LazyGroup(click.Group):
    """A group that imports its commands only when they run, so that ``daskserve --help`` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module_name, _, name = COMMANDS[cmd_name][0].partition(":")
        found: click.Command = getattr(importlib.import_module(module_name), name)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; with ``--json``, an invalid value is also reported as JSON."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            from daskserve.cli.output import CommandError, wants_json  # slow, and not for the help

            if error.ctx is None or not wants_json(error.ctx):
                raise
            kind = type(error).__name__
            raise CommandError(error.format_message(), error.exit_code, kind, error.ctx) from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin with the typed text, without importing them."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=COMMANDS[name][1]) for name in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and help texts of the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="daskserve")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Model serving and Python microservices on any Dask cluster."""
    if settings.process_variables().get("NO_COLOR"):
        ctx.color = False
