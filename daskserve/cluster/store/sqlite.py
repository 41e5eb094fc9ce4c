"""A store in an SQLite file.

An embedded store for instances that outlive their scheduler: one file, no server. With write-ahead logging
and ``synchronous=FULL``, every commit is one sequential write and one sync. A commit that returned survives a
crash of the process, a crash of the machine and a power loss, provided the disk honours the sync. A commit
that may wait (`daskserve.cluster.protocols.base.StoreChange`) is not synced: it survives a crash of the
process at once, and a power loss once a later commit is synced, or the file has been idle.
`daskserve.cluster.store.sqlite_log` describes when the log is written back to the file, and how a missing log
is detected.

Each commit is one ``BEGIN IMMEDIATE`` transaction that checks the epoch and writes under one lock, so the
fence also holds between processes: two schedulers may share a file, and the older controller is refused. The
file must be on a local disk: SQLite's write-ahead log does not work on network file systems.

A file that is removed or moved stays open, and would accept changes that are lost. So a commit checks, before
it writes *and after*, that the open file and log are still at their paths (`FilesWatch`).

Table names start with ``daskserve_``, so other programs may use the same file. Each record has a checksum,
because SQLite has none: a damaged record is moved to ``daskserve_aside``, not returned.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from daskserve.cluster.protocols.stores import Claim
from daskserve.cluster.store.access import FOLDER_MODE, warn_if_shared
from daskserve.cluster.store.errors import (
    FULL,
    READ_ONLY,
    StoreError,
    StoreUnavailableError,
    check_format,
    without_password,
)
from daskserve.cluster.store.problems import StoreProblems
from daskserve.cluster.store.sqlite_claims import TABLES as CLAIM_TABLES
from daskserve.cluster.store.sqlite_claims import SqliteClaims
from daskserve.cluster.store.sqlite_files import FilesWatch, check_not_empty, create_whole, incomplete
from daskserve.cluster.store.sqlite_log import (
    LOG_BYTES,
    NEW_MARKS,
    WALCheckpointer,
    accept,
    log_of,
    mark,
    seal,
    size_of,
    stamp,
)
from daskserve.cluster.store.sqlite_rows import DAMAGED, checksum, format_of, is_sound, lack_of, name_of, scan
from daskserve.cluster.store.thread import BlockingStore
from daskserve.common.formatting import shown
from daskserve.common.types import InstanceName
from daskserve.errors import ServeError

#: The format that this module writes, and the newest one it reads.
FORMAT = 1
#: The statement that upgrades each older format to the next one; none is needed yet.
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

#: Prefixes of SQLite's error names that a retry may fix, with the remedy.
TRANSIENT: Mapping[str, str] = {
    "SQLITE_BUSY": f"another program has held its lock for more than {shown(BUSY_TIMEOUT_S)} s; end that "
    "program or its transaction",
    "SQLITE_LOCKED": "another program holds its lock; end that program or its transaction",
    "SQLITE_FULL": "the disk is full; free some space",
    "SQLITE_IOERR": "the disk reports an error; check the system's log",
    "SQLITE_NOMEM": "SQLite is out of memory; free some memory on the scheduler's machine",
}
#: Prefixes of the errors that a retry does not fix.
PERMANENT: Mapping[str, str] = {
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


def connect(path: Path, *, any_thread: bool = False) -> sqlite3.Connection:
    """Return a connection to a file, for this thread or for any."""
    found = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=not any_thread
    )
    # A damaged key must not prevent reading the other records; the checksum detects it.
    found.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    return found


def _keep_log(db: sqlite3.Connection) -> None:
    """Let the store decide when a connection writes the log back."""
    db.execute("PRAGMA wal_autocheckpoint = 0")
    # SQLite does not shorten a log that it restarts. If the log stayed longer than ``LOG_BYTES``, every
    # change would write it back.
    db.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")


@dataclass(slots=True)
class _OpenDatabase:
    """The open resources of a store: its connection, the files behind it, and the checkpointer."""

    connection: sqlite3.Connection
    files: FilesWatch
    checkpointer: WALCheckpointer | None = None

    def close(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.stop()
            with contextlib.suppress(sqlite3.Error):
                self.connection.execute("PRAGMA synchronous = NORMAL")
                seal(self.connection)
        # Closing the last connection writes the log back, and removes it.
        self.connection.close()


class SqliteStore(BlockingStore):
    """A `BlockingStore` in an SQLite file; the module docstring states its guarantees."""

    def __init__(self, url: str, instance: InstanceName, path: str) -> None:
        self.url = without_password(url)
        self.instance = instance
        self.problems = StoreProblems(self.url, instance)
        self._claims = SqliteClaims(instance)
        self.path = Path(path).absolute()
        self._opened: _OpenDatabase | None = None

    # Lifecycle

    def open(self) -> None:
        self._open(repairs=False)

    def repair(self) -> str:
        """Open the store, and accept the records in the file as complete; return what is missing."""
        return self._open(repairs=True)

    def _open(self, *, repairs: bool) -> str:
        folder = self.path.parent
        if not folder.is_dir():
            raise StoreError(
                f"The store {self.url} cannot be opened: there is no folder {folder} on the scheduler's "
                "machine. Create it or use another file."
            )
        with self._translated_errors():
            create_whole(self.path, self._prepare)
            check_not_empty(self.url, self.path)
            had_log = bool(size_of(log_of(self.path)))
            connection = connect(self.path)
            self._opened = _OpenDatabase(connection, FilesWatch(self.path))
            lack = lack_of(connection, had_log=had_log)
            if lack and not repairs:
                raise incomplete(self.url, self.path, lack)
            self._use_log()
            _keep_log(connection)
        with self._transaction() as db:
            self._prepare(db)
            if lack or had_log:
                accept(db)
        self._opened.files = FilesWatch(self.path)
        self.problems.check_place(self._opened.files.lost(), must_last=True)
        with self._translated_errors():
            keeping = connect(self.path, any_thread=True)
            _keep_log(keeping)
            keeping.execute("PRAGMA synchronous = NORMAL")
        self._opened.checkpointer = WALCheckpointer(keeping, self.url)
        warn_if_shared(self.path)
        return lack

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _use_log(self) -> None:
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                (mode,) = self._db.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                # SQLite's own timeout does not cover the switch to the log.
                if not name_of(error).startswith("SQLITE_BUSY") or time.monotonic() > deadline:
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
        found = format_of(db)
        if found is not None:
            check_format(self.url, found, FORMAT)
        for statement in (*TABLES, *CLAIM_TABLES):
            db.execute(statement)
        if found is None:
            db.execute("INSERT INTO daskserve_meta VALUES ('format', ?)", (FORMAT,))
            db.execute(NEW_MARKS)
            return
        for older in range(found, FORMAT):
            db.execute(UPGRADES[older])
            db.execute("UPDATE daskserve_meta SET value = ? WHERE name = 'format'", (older + 1,))
        db.execute(NEW_MARKS)

    # Records

    def load(self) -> Mapping[str, bytes]:
        with self._translated_errors():
            rows, unreadable = scan(self._db, self.instance)
        records = {}
        damaged = []
        for rowid, key, value, crc in rows:
            if is_sound(key, value, crc):
                records[key] = value
            else:
                damaged.append(rowid)
        self._set_aside(damaged)
        self._note_problems(unreadable, records)
        return records

    def _set_aside(self, rowids: list[int]) -> None:
        if not rowids:
            return
        with self._change() as db:
            for rowid in rowids:
                db.execute(
                    "INSERT INTO daskserve_aside SELECT instance, key, value, crc, ? "
                    "FROM daskserve_records WHERE rowid = ?",
                    (DAMAGED, rowid),
                )
                db.execute("DELETE FROM daskserve_records WHERE rowid = ?", (rowid,))

    def _note_problems(self, unreadable: Mapping[str, str], sound: Collection[str]) -> None:
        with self._translated_errors():
            aside = self._db.execute(
                "SELECT key, reason FROM daskserve_aside WHERE instance = ?", (self.instance,)
            ).fetchall()
        text = "It is kept in the table daskserve_aside."
        kept = {key: f"{reason} {text}" for key, reason in aside if key not in sound}
        self.problems.report({**kept, **unreadable})

    def commit(
        self, epoch: int, records: Mapping[str, bytes | None], must_last: bool = True, may_wait: bool = False
    ) -> None:
        written = [
            (self.instance, key, value, checksum(key, value))
            for key, value in records.items()
            if value is not None
        ]
        removed = [(self.instance, key) for key, value in records.items() if value is None]
        if not records and epoch == self.newest_epoch():
            return self._check_place(must_last)
        with self._change(is_synced=not may_wait) as db:
            self._check_place(must_last)
            self._claims.advance(db, epoch)
            db.executemany(UPSERT, written)
            db.executemany("DELETE FROM daskserve_records WHERE instance = ? AND key = ?", removed)
        self.problems.settle(records.keys())
        self._check_place(must_last)

    def _check_place(self, must_last: bool) -> None:
        assert self._opened is not None
        self.problems.check_place(self._opened.files.lost(), must_last=must_last)

    def rewrite(self, epoch: int, records: Mapping[str, bytes]) -> None:
        rows = [(self.instance, key, value, checksum(key, value)) for key, value in records.items()]
        before, self._opened = self._opened, None
        try:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                self.path.parent.mkdir(FOLDER_MODE)  # open() reports a missing parent folder
            self.open()
            with self._change() as db:
                self._claims.advance(db, epoch)
                db.execute("DELETE FROM daskserve_records WHERE instance = ?", (self.instance,))
                db.executemany(UPSERT, rows)
            self.problems.settle(records.keys())
            self._check_place(True)
        except BaseException:
            self.close()
            self._opened = before
            raise
        if before is not None:
            before.close()

    # Epochs

    def newest_epoch(self) -> int:
        with self._translated_errors():
            return self._claims.newest(self._db)

    def claim_epoch(self, after: int | None = None, owner: str = "") -> int:
        with self._change() as db:
            # A newer daskserve may have written here since this store was opened.
            check_format(self.url, format_of(db) or FORMAT, FORMAT)
            return self._claims.claim(db, after, owner)

    def newest_claim(self, *, answers: bool = False) -> Claim:
        with self._translated_errors():
            is_awaited = answers and self._claims.has_queries(self._db)
        if is_awaited:
            with self._change() as db:
                self._claims.answer(db)
        with self._translated_errors():
            return self._claims.newest_claim(self._db)

    def query_owner(self, by: str) -> bool:
        with self._change() as db:
            return self._claims.query_owner(db, by)

    def forget_query(self, by: str) -> None:
        with self._change() as db:
            self._claims.forget(db, by)

    # SQLite

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._opened is not None
        return self._opened.connection

    @contextmanager
    def _change(self, *, is_synced: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction that changes records or epochs; if it is not synced, a later sync includes it."""
        with self._transaction(is_synced=is_synced) as db:
            yield db
            was_sealed = stamp(db)
        assert self._opened is not None
        assert self._opened.checkpointer is not None
        self._opened.checkpointer.note(was_sealed=was_sealed)
        if (size_of(log_of(self.path)) or 0) > LOG_BYTES:
            with self._translated_errors():
                mark(db)

    @contextmanager
    def _transaction(self, *, is_synced: bool = True) -> Iterator[sqlite3.Connection]:
        db = self._db
        with self._translated_errors():
            db.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'NORMAL'}")
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
            raise translate(self.url, error) from error
        except OSError as error:
            # SQLite does not create the file itself; see `create_whole`.
            what = f"The store {self.url} cannot be used:"
            if isinstance(error, PermissionError) or error.errno in READ_ONLY:
                raise StoreError(f"{what} {PERMANENT['SQLITE_READONLY']}. ({error})") from error
            kind = "SQLITE_FULL" if error.errno in FULL else "SQLITE_IOERR"
            raise StoreUnavailableError(f"{what} {TRANSIENT[kind]}. ({error})") from error


def translate(url: str, error: sqlite3.Error) -> ServeError:
    """Return the store's error for an error of SQLite."""
    name = name_of(error)
    for kinds, error_class in ((TRANSIENT, StoreUnavailableError), (PERMANENT, StoreError)):
        for beginning, remedy in kinds.items():
            if name.startswith(beginning):
                return error_class(f"The store {url} cannot be used: {remedy}. ({name}: {error})")
    return StoreError(f"The store {url} cannot be used: {name or type(error).__name__}: {error}")
