"""What commands print: errors as messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
from pydantic import ValidationError

from daskserve.errors import ReplicaStartError, ServeError
from daskserve.payload.shown_errors import shortened


def is_terminal() -> bool:
    """Return whether standard input is a terminal."""
    return sys.stdin.isatty()


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
