"""The output and the exit codes of commands: errors as messages, JSON, colours.

Nothing but data is on standard output. A command that has `json_option` prints one JSON document there, and
its errors as ``{"error": {"type": ..., "message": ...}}`` on standard error.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, TypeAlias

import click
from pydantic import ValidationError

from daskserve.errors import (
    ClusterUnreachableError,
    ConfigFileError,
    NotRunningError,
    ReplicaStartError,
    ServeError,
)
from daskserve.payload.shown_errors import shortened

#: Adds an option to a command, as `click.option` does.
Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
#: The name of the parameter that `json_option` adds.
_AS_JSON = "as_json"
#: The colours of states.
COLOURS: Mapping[str, tuple[str, ...]] = {
    "green": ("HEALTHY", "RUNNING", "DONE"),
    "red": ("UNHEALTHY", "DEPLOY_FAILED", "FAILED"),
    "yellow": (
        *("DEPLOYING", "NOT_STARTED", "UPDATING", "UPSCALING", "DOWNSCALING", "DELETING"),
        *("STARTING", "STOPPING", "PENDING"),
    ),
}
COLOUR_OF: Mapping[str, str] = {state: colour for colour, states in COLOURS.items() for state in states}
_STATE = re.compile(rf"(?<![\w-])(?:{'|'.join(sorted(COLOUR_OF, key=len, reverse=True))})(?![\w-])")


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    DONE = 0
    #: The command failed, or it reports a failure.
    FAILED = 1
    #: Wrong usage; click's code.
    USAGE = 2
    #: No instance runs there, the cluster cannot be reached, or a command that only reads gets no answer.
    NOT_RUNNING = 3
    #: With ``diff --exit-code``: there are changes.
    CHANGES = 4


class CommandError(click.ClickException):
    """An error with its exit code; printed as JSON if the command has the option ``--json``."""

    def __init__(
        self,
        message: str,
        exit_code: int = ExitCode.FAILED,
        kind: str = "",
        context: click.Context | None = None,
    ) -> None:
        super().__init__(message)
        self.__dict__["exit_code"] = exit_code  # a class variable to type checkers
        self.kind = kind or "CommandError"
        self._is_json = wants_json(context)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error to standard error."""
        if not self._is_json:
            super().show(file)
            return
        click.echo(json.dumps({"error": {"type": self.kind, "message": self.message}}), file=file, err=True)


class FiniteRange(click.FloatRange):
    """A range of numbers. click's own type accepts nan in every range, and infinity in open ranges."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail with a message."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


def options(*decorators: Decorator) -> Decorator:
    """Return a decorator that adds several options to a command."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(decorators):
            command = each(command)
        return command

    return decorate


#: The option ``--json``; its parameter is ``as_json``. It is parsed first, so that errors about other options
#: are JSON, too.
json_option = click.option("--json", _AS_JSON, is_flag=True, is_eager=True, help="Print JSON.")


def wants_json(context: click.Context | None = None) -> bool:
    """Return whether a command, by default the running one, was called with ``--json``."""
    context = context or click.get_current_context(silent=True)
    return context is not None and bool(context.params.get(_AS_JSON))


def print_json(value: Any, *, is_line: bool = False) -> None:
    """Print a value as one JSON document, or as one line of a stream of documents."""
    text = json.dumps(value, indent=None if is_line else 2, default=str, ensure_ascii=False)
    click.echo(text)
    if is_line:
        sys.stdout.flush()


def coloured(text: str) -> str:
    """Return a string with coloured words for states; `click.echo` drops the colours outside of terminals.

    Column names are not coloured, because RUNNING is also the name of a column.
    """
    return "\n".join(
        line if line.isupper() and "STATUS" in line else _STATE.sub(_styled, line)
        for line in text.split("\n")
    )


def _styled(found: re.Match[str]) -> str:
    return click.style(found[0], fg=COLOUR_OF[found[0]])


def is_terminal() -> bool:
    """Return whether standard input is a terminal."""
    return sys.stdin.isatty()


@contextmanager
def writing(file: Path | str) -> Iterator[None]:
    """Show the error of a file that cannot be written as a message."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"Could not write {file}: {error.strerror or error}") from error


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Show daskserve's errors without a traceback, with the names of the command's options."""
    try:
        yield
    except ReplicaStartError as error:
        text = f"{spelled(str(error))}\n\n{shortened(error.user_traceback)}"
        raise _command_error(error, text.rstrip()) from error
    except click.ClickException as error:
        if isinstance(error, CommandError) or not wants_json():
            raise
        raise CommandError(error.format_message(), error.exit_code, type(error).__name__) from error
    except ValidationError as error:
        # imported here, because it loads the models of all options
        from daskserve.config_file.option_checks import text_of

        raise _command_error(error, spelled(text_of(error))) from error
    except (ServeError, TypeError, ValueError) as error:
        # A file has other names than the options of the command.
        text = str(error) if isinstance(error, ConfigFileError) else spelled(str(error))
        raise _command_error(error, text) from error


def _command_error(error: Exception, text: str) -> CommandError:
    is_absent = isinstance(error, NotRunningError | ClusterUnreachableError)
    code = ExitCode.NOT_RUNNING if is_absent else ExitCode.FAILED
    return CommandError(text, code, type(error).__name__)


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
