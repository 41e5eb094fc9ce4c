"""Support for IPython: the names of its cells, and how it shows errors."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

#: Pattern of the names of cells in tracebacks of other processes.
CELL = re.compile(r"Cell In\[(\d+)\]")
_FRAME_OF_CELL = re.compile(r' *File "Cell In\[(\d+)\]", line (\d+), in ')


def shell() -> Any:
    """Return the shell that runs this program; None outside of IPython."""
    ipython: Any = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def in_notebook() -> bool:
    """Return whether this program is a notebook, whose cells run in an event loop."""
    return hasattr(shell(), "kernel")


def in_cell() -> bool:
    """Return whether the current code is a notebook's cell, which may block the loop in which it runs."""
    return in_notebook() and threading.current_thread() is threading.main_thread()


def cell_name(file: str) -> str | None:
    """Return how IPython names the cell that it has compiled as a file, such as ``Cell In[3]``.

    The file does not exist, and its name contains the process id.
    """
    with suppress(AttributeError, TypeError, ValueError):  # the shell is not an `InteractiveShell`
        kind, name = shell().compile.format_code_name(file)
        found = f"{kind} {name}"
        return found if CELL.fullmatch(found) else None
    return None


def with_cell_lines(text: str) -> str:
    """Add the source lines of cells, which only this process has, to a traceback of another process."""
    return "\n".join(_with_cell_lines(text.split("\n"))) if CELL.search(text) else text


def _with_cell_lines(lines: list[str]) -> Iterator[str]:
    with suppress(AttributeError):
        files = {str(number): file for file, number in shell().compile._filename_map.items()}
        for line in lines:
            yield line
            frame = _FRAME_OF_CELL.match(line)
            source = frame and linecache.getline(files.get(frame[1], ""), int(frame[2])).strip()
            if source:
                yield f"    {source}"
        return
    yield from lines


def structured_traceback(error: BaseException) -> list[str]:
    """Return the lines with which IPython shows an error, in the mode that its user has chosen."""
    found: list[str] = shell().InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
    return found
