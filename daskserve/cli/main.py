"""The command ``daskserve``. Each group of commands has its own module, which is imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

from daskserve._version import __version__

#: The location and the help text of each group: ``name -> ("module:group", "help")``.
GROUPS: Mapping[str, tuple[str, str]] = {
    "metrics": ("daskserve.cli.metrics:metrics", "Set up Prometheus and Grafana for daskserve."),
    "simulate": ("daskserve.cli.simulate:simulate", "Try autoscaling policies on a recorded load."),
}


class LazyGroup(click.Group):
    """A group that imports its commands only when they run, so that ``daskserve --help`` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all groups."""
        return sorted(GROUPS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a group; None if there is no group of that name."""
        if cmd_name not in GROUPS:
            return None
        module_name, _, name = GROUPS[cmd_name][0].partition(":")
        found: click.Command = getattr(importlib.import_module(module_name), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and help texts of the groups without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, GROUPS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="daskserve")
def main() -> None:
    """Model serving and Python microservices on any Dask cluster."""
