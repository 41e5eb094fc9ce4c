"""Deletes the log files of actors that ended long ago: otherwise each replica leaves some forever.

A process holds a shared lock on each file that it writes, until it closes the file. So a file in use is kept,
regardless of the age of its last line, and so are the older files beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows, where a file cannot be deleted while it is open
    fcntl = None  # type: ignore[assignment]

#: The names of files that `daskserve.telemetry.logs.process` writes; others may be in the same folder.
_OURS = re.compile(r"((?:replica|proxy|controller)_.+\.log)(?:\.\d+)?")
_DAY_S = 86400


def hold(file: BinaryIO) -> None:
    """Keep a file from being deleted until it is closed, unless its file system has no locks."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)


def delete_old(folder: Path, days: float, now: float) -> None:
    """Delete the files that no process writes and that have not changed for ``days``.

    ``now`` is the time in seconds since the epoch.
    """
    old: dict[str, list[Path]] = {}
    with suppress(OSError):
        for path in folder.iterdir():
            found = _OURS.fullmatch(path.name)
            # Another process may delete the file first.
            with suppress(OSError):
                if found is not None and path.stat().st_mtime < now - days * _DAY_S:
                    old.setdefault(found[1], []).append(path)
    for name, paths in old.items():
        with suppress(OSError), _unused(folder / name):
            for path in paths:
                path.unlink()


@contextmanager
def _unused(path: Path) -> Iterator[None]:
    """Hold a file for its deletion; raise `OSError` if a process writes it."""
    if fcntl is None or not path.exists():
        yield
        return
    with open(path, "rb") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
