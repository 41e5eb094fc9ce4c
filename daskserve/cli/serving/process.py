"""Options for the process of a command; the processes that it starts inherit them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from daskserve.cli.output import options
from daskserve.common import settings

#: The levels of uvicorn, by name.
LOG_LEVELS: Mapping[str, int] = {
    "critical": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}
_VARIABLE = re.compile(r"\s*(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_.]*)\s*=\s*(?P<value>.*?)\s*")
_QUOTED = re.compile(r"(?P<quote>['\"])(?P<text>.*)(?P=quote)\s*(?:#.*)?")


env_file_option = click.option(
    "--env-file",
    type=click.Path(exists=True, dir_okay=False),
    help=(
        "File with a variable NAME=VALUE in each line, for the application. Existing variables take "
        "precedence."
    ),
)
log_level_option = click.option(
    "--log-level",
    type=click.Choice(list(LOG_LEVELS), case_sensitive=False),
    help="Level of daskserve's own messages, in this process and those that it starts. Default: warning.",
)
#: The options of ``logging_config``; `use_log_options` applies them.
log_options = options(
    click.option(
        "--access-log/--no-access-log",
        default=None,
        help="Whether each request is logged as one line on standard output.",
    ),
    click.option(
        "--log-encoding",
        type=click.Choice(["text", "json"], case_sensitive=False),
        help="Encoding of the access log and of what replicas log.  [default: text]",
    ),
    click.option(
        "--logs-dir",
        type=click.Path(file_okay=False),
        help="Folder of log files on the hosts of the workers. Default: no files.",
    ),
)


def use_log_options(
    values: Mapping[str, Any], in_file: Mapping[str, Any] | None = None, *, is_access_log_on: bool = False
) -> None:
    """Configure logging: options win over the configuration file, which wins over ``daskserve.logging``.

    Parameters
    ----------
    in_file : dict
        The ``logging_config`` of the file.
    is_access_log_on : bool
        Whether there is an access log if neither sets this.
    """
    import dask.config

    names = {"access_log": "enable_access_log", "log_encoding": "encoding", "logs_dir": "logs_dir"}
    found = {**(settings.logging_defaults() or {}), **(in_file or {})}
    found |= {name: values[each] for each, name in names.items() if values[each] is not None}
    if is_access_log_on:
        found.setdefault("enable_access_log", True)
        if found.get("logs_dir"):
            found.setdefault("output", "both")
    if found:
        dask.config.set({"daskserve.logging": found})


def read_variables(text: str, name: str) -> dict[str, str]:
    """Return the variables that a file's text sets; raise `click.UsageError` for any other line."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _VARIABLE.fullmatch(line)
        if match is None:
            raise click.UsageError(f"{name}:{number}: a line must have the form NAME=VALUE, got {line!r}.")
        value = match["value"]
        quoted = _QUOTED.fullmatch(value)
        found[match["name"]] = quoted["text"] if quoted else re.sub(r"\s+#.*", "", value)
    return found


def use_env_file(name: str | None) -> dict[str, str]:
    """Set the variables of a file in this process, and return them."""
    if name is None:
        return {}
    try:
        found = read_variables(Path(name).read_text(encoding="utf-8"), name)
    except UnicodeDecodeError as error:
        raise click.UsageError(f"The file {name!r} is not UTF-8: {error}") from error
    set_already = settings.process_variables()
    values = {each: set_already.get(each, value) for each, value in found.items()}
    settings.add_process_variables(values)
    return values


def use_log_level(name: str | None) -> None:
    """Set daskserve's log level in this process and in the processes that it starts."""
    if name is None:
        return
    level = LOG_LEVELS[name.lower()]
    settings.add_process_variables({"DASK_LOGGING__DASKSERVE": logging.getLevelName(level).lower()})
    logger = logging.getLogger("daskserve")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
        logger.addHandler(handler)
