"""Generate tables of errors, commands, configuration keys and Ray Serve's names from their definitions.

Without arguments, rewrite the files. With ``--check``, exit with 1 if one of them is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import click
from document_options import table as option_table
from generated_tables import GeneratedTables

from daskserve import errors
from daskserve.cli.main import main
from daskserve.common import settings
from daskserve.config_file import ray_keys
from daskserve.config_file.model import ApplicationConfig, InstanceConfig
from daskserve.config_file.ray_keys import RayKey
from daskserve.options.fields.ray_names import INSTEAD, OTHER_NAMES

#: The parts of the configuration file.
FILE_MODELS: dict[str, type[Any]] = {each.__name__: each for each in (InstanceConfig, ApplicationConfig)}
#: The keys of Ray Serve's files that are not read, by the part that has them.
UNREAD_KEYS: dict[str, Mapping[str, RayKey]] = {
    "file": ray_keys.INSTANCE,
    "`http_options`": ray_keys.HTTP,
    "application": ray_keys.APPLICATION,
    "deployment": ray_keys.DEPLOYMENT,
    "`ray_actor_options`": ray_keys.ACTOR,
    "`runtime_env`": ray_keys.ENVIRONMENT,
}
#: The classes of settings, by the section of Dask's configuration that they are read from.
SECTIONS: dict[str, type[Any]] = {
    "daskserve.timeouts": settings.Timeouts,
    "daskserve.local-cluster": settings.LocalClusterSize,
    "daskserve.process": settings.ProcessSettings,
    "daskserve.metrics": settings.MetricsSettings,
    "daskserve.scheduler": settings.SchedulerSettings,
    "daskserve.channel": settings.ChannelSettings,
    "daskserve.controller": settings.ControllerSettings,
    "daskserve.errors": settings.ErrorSettings,
    "daskserve.routing": settings.RoutingSettings,
}


def cell(text: str) -> str:
    """Return a string of one line for a cell of a table."""
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def remedies() -> dict[str, str]:
    """Return the advice for each error from the tree in the docstring of `daskserve.errors`."""
    lines = (errors.__doc__ or "").splitlines()
    matches = [re.search(r"(\w+Error)\b(?: +\([\w, ]+\))?(?: +\d{3})?(?: +(\S.*))?$", line) for line in lines]
    return {match[1]: match[2] for match in matches if match and match[2]}


def error_table() -> str:
    """Return all errors as a table."""
    known = remedies()
    rows = []
    for kind in dict.fromkeys(errors.subclasses()):
        if kind is errors.ServeError or kind.__module__ != errors.__name__:
            continue
        bases = [each for each in kind.__mro__[1:] if issubclass(each, errors.ServeError)]
        remedy = next((known[each.__name__] for each in [kind, *bases] if each.__name__ in known), "")
        others = [each.__name__ for each in kind.__bases__ if not issubclass(each, errors.ServeError)]
        anchor = f'<a id="{kind.__name__.lower()}"></a>'  # error messages link to these headings
        name = f"{anchor}`{kind.__name__}`" + (
            f" ({', '.join(f'`{each}`' for each in others)})" if others else ""
        )
        cause = (inspect.getdoc(kind) or "").partition("\n\n")[0]
        rows.append([name, str(kind.http_status), cell(cause), cell(remedy)])
    return table(["error", "HTTP status", "cause", "what to do"], rows)


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command, or those of a group, with their names."""
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), f"{path} {name}".strip())  # type: ignore[arg-type]
    else:
        yield path, command


def command_pages() -> str:
    """Return all commands, with their usage and their options."""
    parts = []
    for name, command in commands(main, "daskserve"):
        context = click.Context(command, info_name=name)
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        text = inspect.cleandoc(command.help or "").replace("\b\n", "").replace("<", "&lt;")
        records = [each.get_help_record(context) for each in command.params]
        rows = [[f"`{cell(record[0])}`", cell(record[1])] for record in records if record]
        options = f"\n\n{table(['option', 'meaning'], rows)}" if rows else "\n"
        parts.append(f"## {name}\n\n```\n{usage}\n```\n\n{text}{options}")
    return "\n" + "\n".join(parts) + "\n"


def comments(model: type[Any]) -> dict[str, str]:
    """Return the comment above each field of a dataclass."""
    lines = inspect.getsource(model).splitlines()
    (definition,) = ast.parse(inspect.cleandoc("\n".join(lines))).body
    found = {}
    for node in definition.body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = last = node.lineno - 1
            while lines[first - 1].strip().startswith("#:"):
                first -= 1
            found[node.target.id] = " ".join(
                line.strip().removeprefix("#:").strip() for line in lines[first:last]
            )
    return found


def configuration_table() -> str:
    """Return the keys of all sections as one table."""
    rows = []
    for section, model in SECTIONS.items():
        meanings = comments(model)
        for field in fields(model):
            key = f"{section}.{field.name.replace('_', '-')}"
            rows.append([f"`{key}`", f"`{field.default!r}`", cell(meanings.get(field.name, ""))])
    return table(["key", "default", "meaning"], rows)


def absent_names() -> str:
    """Return the options and names of Ray Serve that daskserve lacks, with their replacements."""
    rows = [[f"`{name}`", cell(remedy)] for name, remedy in sorted({**INSTEAD, **OTHER_NAMES}.items())]
    return table(["Ray Serve", "instead"], rows)


#: Any key whose value matters.
_SOME = {"grpc_servicer_functions": ["a.b"], "request_router_class": "a:B"}


def file_table(model: str) -> str:
    """Return the keys of a part of the configuration file."""
    return option_table(FILE_MODELS[model])


def unread_keys() -> str:
    """Return the keys of Ray Serve's files that are not read."""
    rows = [
        [where, f"`{name}`", "ignored" if key.is_harmless(_SOME) else "refused", cell(key.text)]
        for where, keys in UNREAD_KEYS.items()
        for name, key in keys.items()
    ]
    return table(["where", "key", "", "instead"], rows)


TABLES = (
    GeneratedTables("docs/config_file.md", r"config file: (\w+)", file_table),
    GeneratedTables("docs/config_file.md", "config file keys of Ray", unread_keys),
    GeneratedTables("docs/errors.md", "errors", error_table),
    GeneratedTables("docs/commands.md", "commands", command_pages),
    GeneratedTables("docs/configuration.md", "configuration", configuration_table),
    GeneratedTables("docs/migrating.md", "names of Ray Serve", absent_names),
)


if __name__ == "__main__":
    sys.exit(max(each.main() for each in TABLES))
