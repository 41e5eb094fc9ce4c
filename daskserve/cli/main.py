"""The command ``daskserve``. Each group of commands is a module of its own, imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

from daskserve._version import __version__

#: Where each group is found, and what the help says of it: ``name -> ("module:group", "help")``.
GROUPS: Mapping[str, tuple[str, str]] = {
    "metrics": ("daskserve.cli.metrics:metrics", "Bring Prometheus and daskserve together."),
    "simulate": ("daskserve.cli.simulate:simulate", "Try autoscaling policies on a recorded load."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported only when they run: ``daskserve --help`` must be quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all groups."""
        return sorted(GROUPS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a group, imported now; None if there is none of that name."""
        if cmd_name not in GROUPS:
            return None
        module_name, _, name = GROUPS[cmd_name][0].partition(":")
        found: click.Command = getattr(importlib.import_module(module_name), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups' names and helps without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, GROUPS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="daskserve")
def main() -> None:
    """Model serving and Python microservices on any Dask cluster."""
