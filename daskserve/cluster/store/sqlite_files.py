"""The files of an SQLite store: creates new ones atomically, and detects replaced and incomplete ones."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import uuid
from collections.abc import Callable
from pathlib import Path

from daskserve.cluster.store.access import create_empty
from daskserve.cluster.store.errors import StoreError, StoreIncompleteError
from daskserve.cluster.store.folders import sync
from daskserve.cluster.store.sqlite_log import log_of, size_of


class FilesWatch:
    """Checks whether the database and log that SQLite has open are still at their paths."""

    def __init__(self, path: Path) -> None:
        self._paths = (path, log_of(path))
        self._opened = [_identity(each) for each in self._paths]

    def lost(self) -> str:
        """Return what happened to a file; empty if nothing has."""
        for path, opened in zip(self._paths, self._opened, strict=True):
            found = _identity(path)
            if found is None:
                return f"the file {path} was removed or moved"
            if found != opened:
                return f"{path} was replaced by another file after it was opened"
        return ""


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def create_whole(path: Path, fill: Callable[[sqlite3.Connection], None]) -> None:
    """Create a database if there is no file; it appears with its tables, or not at all.

    So a process that is killed here does not leave a file without tables, which would look like a damaged
    store.
    """
    target = Path(os.path.realpath(path))
    if size_of(target) is not None:
        return
    new = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.new")
    create_empty(new)
    try:
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = OFF")  # the file is not in use yet, and is synced as a whole
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")
            fill(db)
            db.execute("COMMIT")
        sync(new)
        _publish(new, target)
    finally:
        with contextlib.suppress(OSError):  # the failure to write was already reported
            new.unlink()


def _publish(new: Path, target: Path) -> None:
    try:
        os.link(new, target)
    except FileExistsError:
        return  # another process was faster
    except OSError:
        # This file system has no hard links.
        os.rename(new, target)
    sync(target.parent)


def check_not_empty(url: str, path: Path) -> None:
    """Raise `StoreIncompleteError` for a file of 0 bytes, which SQLite would treat as a new database."""
    if size_of(path) == 0:
        raise StoreIncompleteError(
            f"The store {url} cannot be used: the file {path} is empty. If it had records, "
            "restore a backup; for a new store, remove the file first."
        )


def incomplete(url: str, path: Path, lack: str) -> StoreError:
    """Return the error for a file with missing parts."""
    return StoreIncompleteError(
        f"The store {url} cannot be used, because records are missing: {lack}. If {path} is a copy that was "
        f"made without {log_of(path).name}, copy both, or restore a backup (daskserve store restore). To "
        "continue with the remaining records: daskserve store repair. Nothing was changed."
    )
