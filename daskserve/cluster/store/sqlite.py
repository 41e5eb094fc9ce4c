"""A store in an SQLite file.

An embedded store for instances that outlive their scheduler: one file, no server. With write-ahead logging
and ``synchronous=FULL``, every commit is one sequential write and one sync. A commit that returned survives
a crash of the process, a crash of the machine and a power loss, provided the disk honours the sync. Each
commit is one ``BEGIN IMMEDIATE`` transaction that checks the epoch and writes under one lock, so the fence
also holds between processes: two schedulers may share a file, and the older controller is refused. The file
must be on a local disk: SQLite's write-ahead log does not work on network file systems.

A file that is removed or moved stays open, and would take changes that nobody finds again. So a commit
checks, before it writes *and after*, that the file and its log are those at the path (`FilesWatch`).

Table names start with ``daskserve_``, so other programs may use the same file. Each record has a checksum,
because SQLite has none: a damaged record is moved to ``daskserve_aside``, not returned.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from daskserve.amounts import shown
from daskserve.cluster.store.access import FOLDER_MODE, create_empty, warn_if_shared
from daskserve.cluster.store.errors import (
    StoreError,
    StoreUnavailableError,
    check_format,
    stale,
    without_password,
)
from daskserve.cluster.store.problems import StoreProblems
from daskserve.errors import ServeError
from daskserve.types import InstanceName

#: The format that this module writes, and the newest one it reads.
FORMAT = 1
#: The statement that upgrades each older format to the next one; there is none yet.
UPGRADES: Mapping[int, str] = {}

#: How long a transaction waits for another program's lock.
BUSY_TIMEOUT_S = 5.0
BUSY_RETRY_S = 0.02

TABLES = (
    "CREATE TABLE IF NOT EXISTS daskserve_meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS daskserve_epochs (instance TEXT PRIMARY KEY, epoch INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS daskserve_records (instance TEXT NOT NULL, key TEXT NOT NULL, "
    "value BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (instance, key))",
    "CREATE TABLE IF NOT EXISTS daskserve_aside (instance TEXT NOT NULL, key TEXT NOT NULL, "
    "value BLOB, crc INTEGER, reason TEXT NOT NULL)",
)
UPSERT = (
    "INSERT INTO daskserve_records (instance, key, value, crc) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (instance, key) DO UPDATE SET value = excluded.value, crc = excluded.crc"
)
SET_EPOCH = (
    "INSERT INTO daskserve_epochs (instance, epoch) VALUES (?, ?) "
    "ON CONFLICT (instance) DO UPDATE SET epoch = excluded.epoch"
)

#: Prefixes of SQLite's error names that a retry may fix, with the remedy.
PASSING: Mapping[str, str] = {
    "SQLITE_BUSY": f"another program has held its lock for more than {shown(BUSY_TIMEOUT_S)} s; end that "
    "program or its transaction",
    "SQLITE_LOCKED": "another program holds its lock; end that program or its transaction",
    "SQLITE_FULL": "the disk is full; free some space",
    "SQLITE_IOERR": "the disk reports an error; check the system's log",
    "SQLITE_NOMEM": "SQLite is out of memory; free some memory on the scheduler's machine",
}
#: Prefixes of the errors that a retry does not fix.
LASTING: Mapping[str, str] = {
    "SQLITE_READONLY": "it cannot be written; give the scheduler's user the right to write the file and its "
    "folder, or use another file",
    "SQLITE_PERM": "the scheduler's user may not use it; change its permissions or use another file",
    "SQLITE_CANTOPEN": "it cannot be opened; the path must name a file, in a folder that the scheduler's "
    "user may write",
    "SQLITE_NOTADB": "the file exists, but it is not an SQLite database; use another file",
    "SQLITE_CORRUPT": "the file is damaged; make a copy, then repair it with sqlite3's .recover command or "
    "restore a backup",
    "SQLITE_PROTOCOL": "SQLite's locks do not work there; use a disk of the scheduler's machine, or another "
    "kind of store",
}


class FilesWatch:
    """Whether the files that SQLite has open, the database and its log, are those at their paths."""

    def __init__(self, path: Path) -> None:
        # SQLite follows links, and keeps its log beside the file itself.
        self._paths = (path, Path(f"{os.path.realpath(path)}-wal"))
        self._opened = [_identity(each) for each in self._paths]

    def lost(self) -> str:
        """Return what has happened to a file; empty if nothing has."""
        for path, opened in zip(self._paths, self._opened, strict=True):
            found = _identity(path)
            if found is None:
                return f"the file {path} was removed or moved"
            if found != opened:
                return f"{path} is another file than the one that was opened"
        return ""


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


class SqliteStore:
    """A `BlockingStore` in an SQLite file; the module docstring states its guarantees."""

    def __init__(self, url: str, instance: InstanceName, path: str) -> None:
        self.url = without_password(url)
        self.instance = instance
        self.problems = StoreProblems(self.url, instance)
        self._path = Path(path).absolute()
        self._connection: sqlite3.Connection | None = None
        self._files: FilesWatch | None = None

    # Lifecycle

    def open(self) -> None:
        folder = self._path.parent
        if not folder.is_dir():
            raise StoreError(
                f"The store {self.url} cannot be opened: there is no folder {folder} on the scheduler's "
                "machine. Create it or use another file."
            )
        # SQLite gives its log the mode of the file.
        create_empty(self._path)
        with self._translated_errors():
            self._connection = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            # A damaged key must not prevent reading the other records; the checksum detects it.
            self._connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
            self._use_log()
            self._connection.execute("PRAGMA synchronous = FULL")
        with self._transaction() as db:
            self._prepare(db)
        self._files = FilesWatch(self._path)
        self.problems.check_place(self._files.lost(), must_last=True)
        warn_if_shared(self._path)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _use_log(self) -> None:
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                (mode,) = self._db.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                # SQLite's own timeout does not cover the switch to the log.
                if not _name_of(error).startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                    raise
                time.sleep(BUSY_RETRY_S)
                continue
            if mode != "wal":
                raise StoreError(
                    f"The store {self.url} cannot be used: SQLite cannot keep a write-ahead log there (it "
                    f"chose {mode!r}); use a disk of the scheduler's machine, or another kind of store."
                )
            return

    def _prepare(self, db: sqlite3.Connection) -> None:
        found = self._format(db)
        if found is None:
            for statement in TABLES:
                db.execute(statement)
            db.execute("INSERT INTO daskserve_meta VALUES ('format', ?)", (FORMAT,))
            return
        check_format(self.url, found, FORMAT)
        for older in range(found, FORMAT):
            db.execute(UPGRADES[older])
            db.execute("UPDATE daskserve_meta SET value = ? WHERE name = 'format'", (older + 1,))

    @staticmethod
    def _format(db: sqlite3.Connection) -> int | None:
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'daskserve_meta'").fetchone() is None:
            return None
        row = db.execute("SELECT value FROM daskserve_meta WHERE name = 'format'").fetchone()
        return None if row is None else int(row[0])

    # Records

    def load(self) -> Mapping[str, bytes]:
        with self._translated_errors():
            try:
                rows = self._db.execute(
                    "SELECT rowid, key, value, crc FROM daskserve_records WHERE instance = ?",
                    (self.instance,),
                ).fetchall()
                unreadable: dict[str, str] = {}
            except sqlite3.DatabaseError as error:
                if not _name_of(error).startswith("SQLITE_CORRUPT"):
                    raise
                rows, unreadable = self._salvage()
        records = {}
        damaged = []
        for rowid, key, value, crc in rows:
            if isinstance(key, str) and isinstance(value, bytes) and _checksum(key, value) == crc:
                records[key] = value
            else:
                damaged.append(rowid)
        self._set_aside(damaged)
        self._note_problems(unreadable)
        return records

    def _salvage(self) -> tuple[list[tuple[int, str, bytes, int]], dict[str, str]]:
        """Read a damaged file record by record; return the rows, and the reason for each unreadable key."""
        rows: list[tuple[int, str, bytes, int]] = []
        unreadable = {}
        where = "FROM daskserve_records WHERE instance = ? AND key = ?"
        keys = self._db.execute(
            "SELECT key FROM daskserve_records WHERE instance = ? ORDER BY key", (self.instance,)
        ).fetchall()  # the index alone answers this query
        for (key,) in keys:
            try:
                found = self._db.execute(f"SELECT rowid, key, value, crc {where}", (self.instance, key))
                rows.extend(found.fetchall())
            except sqlite3.DatabaseError as error:
                unreadable[key] = f"The record cannot be read ({error}). It stays in the file."
        return rows, unreadable

    def _set_aside(self, rowids: list[int]) -> None:
        if not rowids:
            return
        reason = "The record was damaged in the file (its checksum differs)."
        with self._transaction() as db:
            for rowid in rowids:
                db.execute(
                    "INSERT INTO daskserve_aside SELECT instance, key, value, crc, ? "
                    "FROM daskserve_records WHERE rowid = ?",
                    (reason, rowid),
                )
                db.execute("DELETE FROM daskserve_records WHERE rowid = ?", (rowid,))

    def _note_problems(self, unreadable: Mapping[str, str]) -> None:
        with self._translated_errors():
            aside = self._db.execute(
                "SELECT key, reason FROM daskserve_aside WHERE instance = ?", (self.instance,)
            ).fetchall()
        kept = {key: f"{reason} It is kept in the table daskserve_aside." for key, reason in aside}
        self.problems.report({**kept, **unreadable})

    def commit(self, epoch: int, records: Mapping[str, bytes | None], must_last: bool = True) -> None:
        written = [
            (self.instance, key, value, _checksum(key, value))
            for key, value in records.items()
            if value is not None
        ]
        removed = [(self.instance, key) for key, value in records.items() if value is None]
        with self._transaction() as db:
            self._check_place(must_last)
            self._advance(db, epoch)
            db.executemany(UPSERT, written)
            db.executemany("DELETE FROM daskserve_records WHERE instance = ? AND key = ?", removed)
        self._check_place(must_last)

    def _check_place(self, must_last: bool) -> None:
        assert self._files is not None
        self.problems.check_place(self._files.lost(), must_last=must_last)

    def _advance(self, db: sqlite3.Connection, epoch: int) -> None:
        newest = self._epoch(db)
        if epoch < newest:
            raise stale(epoch, newest)
        if epoch > newest:
            db.execute(SET_EPOCH, (self.instance, epoch))

    def rewrite(self, epoch: int, records: Mapping[str, bytes]) -> None:
        rows = [(self.instance, key, value, _checksum(key, value)) for key, value in records.items()]
        before = self._connection, self._files
        self._connection = None
        try:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                self._path.parent.mkdir(FOLDER_MODE)  # open() says what is missing above it
            self.open()
            with self._transaction() as db:
                self._advance(db, epoch)
                db.execute("DELETE FROM daskserve_records WHERE instance = ?", (self.instance,))
                db.executemany(UPSERT, rows)
            self._check_place(True)
        except BaseException:
            self.close()
            self._connection, self._files = before
            raise
        if before[0] is not None:
            before[0].close()

    # Epochs

    def newest_epoch(self) -> int:
        with self._translated_errors():
            return self._epoch(self._db)

    def claim_epoch(self) -> int:
        with self._transaction() as db:
            # A newer daskserve may have written here since this store was opened.
            check_format(self.url, self._format(db) or FORMAT, FORMAT)
            claimed = self._epoch(db) + 1
            db.execute(SET_EPOCH, (self.instance, claimed))
        return claimed

    def _epoch(self, db: sqlite3.Connection) -> int:
        row = db.execute("SELECT epoch FROM daskserve_epochs WHERE instance = ?", (self.instance,)).fetchone()
        return 0 if row is None else int(row[0])

    # SQLite

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None
        return self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._db
        with self._translated_errors():
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translate(error) from error

    def _translate(self, error: sqlite3.Error) -> ServeError:
        name = _name_of(error)
        for kinds, error_class in ((PASSING, StoreUnavailableError), (LASTING, StoreError)):
            for beginning, remedy in kinds.items():
                if name.startswith(beginning):
                    return error_class(f"The store {self.url} cannot be used: {remedy}. ({name}: {error})")
        return StoreError(f"The store {self.url} cannot be used: {name or type(error).__name__}: {error}")


def _checksum(key: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key.encode("utf-8", "surrogateescape")))


def _name_of(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", None) or ""
