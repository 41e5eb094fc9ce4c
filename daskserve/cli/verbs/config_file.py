"""``daskserve schema`` and ``daskserve build``: help for those who write configuration files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from daskserve.cli.instance import InstanceAddress, instance_options, reading
from daskserve.cli.output import json_option, print_json, writing
from daskserve.config_file.writing import SCHEMA_FILE, SCHEMA_LINE, to_json, to_yaml


@click.command()
@json_option
def schema(as_json: bool) -> None:
    """Print the JSON Schema of configuration files, for editors.

    Write it to a file next to the configuration, and name the schema in the configuration's first line, as
    `daskserve build` does: editors that use yaml-language-server then complete the options. It is JSON with
    and without --json.
    """
    from daskserve.config_file.json_schema import json_schema

    print_json(json_schema())


@click.command()
@click.argument("paths", nargs=-1, metavar="[IMPORT_PATH]...")
@click.option(
    "-o", "--output-path", type=click.Path(dir_okay=False), help="File to write. Default: print it."
)
@click.option(
    "-d", "--app-dir", default=".", show_default=True, help="Folder in which modules are found, too."
)
@click.option(
    "--running",
    is_flag=True,
    help=(
        "Write the running applications of a cluster. The arguments are then names of applications; "
        "without any, all."
    ),
)
@instance_options
@json_option
def build(
    at: InstanceAddress,
    paths: tuple[str, ...],
    output_path: str | None,
    app_dir: str,
    running: bool,
    as_json: bool,
) -> None:
    """Write the configuration file of applications, as YAML or, with --json, as JSON.

    The file lists the options that the code of each IMPORT_PATH sets, so that you can change them. Deploying
    the file unchanged gives the same result as deploying the code.
    """
    if not paths and not running:
        raise click.UsageError("Give the import path of an application, such as module:app, or --running.")
    values, notes = _running(at, paths) if running else _importable(paths, app_dir)
    for each in notes:
        click.echo(each, err=True)
    note = f"# daskserve schema > {SCHEMA_FILE} writes the JSON Schema for editors.\n"
    text = to_json(values) if as_json else f"{SCHEMA_LINE}{note}{to_yaml(values)}"
    if output_path is None:
        click.echo(text, nl=False)
    else:
        with writing(output_path):
            Path(output_path).write_text(text, encoding="utf-8")


def _importable(paths: Sequence[str], app_dir: str) -> tuple[dict[str, Any], list[str]]:
    from daskserve.client.hosting.describing import described_paths

    sys.path.insert(0, os.path.abspath(app_dir))
    applications, notes = described_paths(paths)
    return {"applications": applications}, notes


def _running(at: InstanceAddress, applications: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    from daskserve.client.hosting.describing import declared

    with reading(at) as client:
        return declared(client, applications)
