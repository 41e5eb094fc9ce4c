"""The write-ahead log of an SQLite store: its content, and when it is written back.

Problem: SQLite keeps new records in the log, ``<file>-wal``, perhaps all of them. A copy of the file without
its log is then an older or empty store, and SQLite does not report this.

Choice: the file itself records whether it is complete. Rows of ``daskserve_meta`` are marks:

* ``promised`` and ``kept``. `mark` increases ``promised``, writes the log back to the file, and then
  increases ``kept`` in the log only. So in a file without its log, ``kept`` is less than ``promised``; with
  the log, they are equal. A copy that SQLite makes (``.backup``, ``VACUUM INTO``) has both rows, too. A copy
  that is made exactly while the log is written back is refused even though it is complete.
* ``sealed``: `seal` has written everything back, so the file is complete, until the next change.
* ``records`` and ``epochs``: how many records there are, and the sum of all epochs, as of the last change. A
  file with fewer records has lost some. If the sum differs, an older daskserve has written without marks.

Marks and seals are written by `WALCheckpointer`, in a separate thread with a separate connection, so a change
waits only for its own sync. The checkpointer marks the file a moment after the first change since the seal,
when the change is already acknowledged; a copy made in between has the records from before the change.
"""

from __future__ import annotations

import enum
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from daskserve.common.clock import stopwatch
from daskserve.telemetry.error_log import SparseLog

logger = logging.getLogger("daskserve.store")

#: Delay after the last change before the log is written back to the file.
IDLE_S = 1.0
#: Size of the log from which a change writes it back itself.
LOG_BYTES = 4 << 20
#: Interval at which a checkpoint that fails is logged again.
LOG_S = 60.0

NEW_MARKS = (
    "INSERT OR IGNORE INTO daskserve_meta (name, value) "
    "VALUES ('promised', 0), ('kept', 0), ('sealed', 1), ('records', 0), ('epochs', -1)"
)
_STAMP = (
    "UPDATE daskserve_meta SET value = CASE name WHEN 'sealed' THEN 0 "
    "WHEN 'records' THEN (SELECT COUNT(*) FROM daskserve_records) "
    "ELSE (SELECT COALESCE(SUM(epoch), 0) FROM daskserve_epochs) END "
    "WHERE name IN ('sealed', 'records', 'epochs')"
)
_PROMISE = "UPDATE daskserve_meta SET value = value + 1 WHERE name = 'promised'"
_KEEP = (
    "UPDATE daskserve_meta SET value = (SELECT value FROM daskserve_meta WHERE name = 'promised') "
    "WHERE name = 'kept'"
)
_SEAL = "UPDATE daskserve_meta SET value = 1 WHERE name = 'sealed'"

# Changes a value, because SQLite writes nothing if nothing changes.
_TOUCH = "UPDATE daskserve_meta SET value = value + 1 WHERE name IN ('promised', 'kept')"


def log_of(path: Path) -> Path:
    """Return the path of the log; SQLite follows links, and keeps its log beside the file itself."""
    return Path(f"{os.path.realpath(path)}-wal")


def size_of(path: Path) -> int | None:
    """Return the size of a file; None if there is none."""
    # No open(): closing a file drops all locks that this process holds on it, including SQLite's.
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def stamp(db: sqlite3.Connection) -> bool:
    """Record the expected content at the end of a transaction; return whether the file was sealed before."""
    row = db.execute("SELECT value FROM daskserve_meta WHERE name = 'sealed'").fetchone()
    db.execute(_STAMP)
    return row is not None and bool(row[0])


def missing(db: sqlite3.Connection, *, had_log: bool) -> str:
    """Return what is missing in a file according to its marks; empty if nothing is missing.

    ``had_log`` says whether there was a log when the file was opened. If there was a log, an open promise
    comes from a process that was killed at that moment.
    """
    marks = dict(db.execute("SELECT name, value FROM daskserve_meta").fetchall())
    if not had_log and marks.get("promised", 0) != marks.get("kept", 0):
        return "later changes were written to its log, which is missing"
    (epochs,) = db.execute("SELECT COALESCE(SUM(epoch), 0) FROM daskserve_epochs").fetchone()
    (records,) = db.execute("SELECT COUNT(*) FROM daskserve_records").fetchone()
    if marks.get("epochs") == epochs and records < marks.get("records", 0):
        return f"it has {records} records and should have {marks['records']}"
    return ""


def accept(db: sqlite3.Connection) -> None:
    """Accept the file as complete; call this in a transaction."""
    db.execute(NEW_MARKS)
    db.execute(_STAMP)
    db.execute(_KEEP)


def mark(db: sqlite3.Connection) -> None:
    """Write the log back, and mark the file as incomplete without its log."""
    db.execute(_PROMISE)
    _write_back(db)
    db.execute(_KEEP)


def seal(db: sqlite3.Connection) -> None:
    """Write the log back, so that the file is complete."""
    db.execute("BEGIN IMMEDIATE")
    db.execute(_KEEP)
    db.execute(_SEAL)
    db.execute("COMMIT")
    _write_back(db)
    # The next write starts a new log and syncs its header. This is done here because no change waits for it.
    db.execute(_TOUCH)


def _write_back(db: sqlite3.Connection) -> None:
    # PASSIVE, so that changes are not blocked. It writes less if another program reads an older state.
    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


class _Note(enum.Enum):
    CHANGE = enum.auto()
    FIRST_CHANGE = enum.auto()
    END = enum.auto()


class WALCheckpointer:
    """Marks the file after the first change, and seals it after a while without changes.

    Parameters
    ----------
    db
        A separate connection to the same file, for use in any thread.
    url : str
        The store's URL, for the log.
    """

    def __init__(self, db: sqlite3.Connection, url: str) -> None:
        self._db = db
        self._url = url
        self._logged = SparseLog(LOG_S)
        self._notes: queue.SimpleQueue[_Note] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="daskserve-store-log", daemon=True)
        self._thread.start()

    def note(self, *, was_sealed: bool) -> None:
        """Record that a change was written."""
        self._notes.put(_Note.FIRST_CHANGE if was_sealed else _Note.CHANGE)

    def stop(self) -> None:
        """Stop after the current work, and close the connection."""
        self._notes.put(_Note.END)
        self._thread.join()
        self._db.close()

    def _work(self) -> None:
        is_busy = is_marked = False
        while True:
            try:
                note = self._notes.get(timeout=IDLE_S) if is_busy else self._notes.get()
            except queue.Empty:
                is_busy = not self._try(seal)
                is_marked = False
                continue
            if note is _Note.END:
                return
            if note is _Note.FIRST_CHANGE or not (is_busy or is_marked):
                is_marked = self._try(mark)
            is_busy = True

    def _try(self, job: Callable[[sqlite3.Connection], None]) -> bool:
        try:
            job(self._db)
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            # A full disk fails every attempt, one per second, until there is room.
            if self._logged.take(str(error), stopwatch()) is not None:
                logger.warning("The write-ahead log of store %s was not checkpointed: %s", self._url, error)
            return False
        return True
