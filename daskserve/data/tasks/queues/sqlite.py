"""A queue of tasks in an SQLite file, for the processes of one machine.

Each method is one transaction, under SQLite's own lock, so any number of processes may share the file. With a
write-ahead log and ``synchronous=FULL``, accepted tasks survive a power loss; without the sync, they survive
the end of any process. The log needs shared memory, so the file cannot be on a network file system.

Large payloads are in a separate table, because SQLite writes the whole row at each change of state.
Triggers count the tasks, because the length of a queue is checked each time that something is submitted.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daskserve.data.tasks.errors import TaskQueueError
from daskserve.data.tasks.queues.protocol import Change, Lease, QueueStats, check_room, check_same
from daskserve.data.tasks.states import CHANGED, ENDED, FIXED, WAITING, Task, TaskState, claimed

#: How long a transaction waits for another process.
BUSY_TIMEOUT_S = 10.0
#: Payloads above this size are stored in a separate row.
INLINE_BYTES = 2000
FORMAT = 1

#: The place of a task: it waits for its time, is ready, runs, or has ended.
DELAYED, READY, RUNNING, OVER = range(4)

COLUMNS = (*FIXED, *CHANGED, "progress")
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS daskserve_tasks (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL, queue TEXT NOT NULL, name TEXT NOT NULL,
    created_at REAL NOT NULL, due_at REAL NOT NULL, priority INTEGER NOT NULL, digest TEXT NOT NULL,
    result_ttl_s REAL, state TEXT NOT NULL, revision INTEGER NOT NULL, attempts INTEGER NOT NULL,
    retries INTEGER NOT NULL, losses INTEGER NOT NULL, owner TEXT NOT NULL, lease_until REAL NOT NULL,
    is_cancelled INTEGER NOT NULL, result BLOB, error TEXT NOT NULL, ended_at REAL NOT NULL,
    expires_at REAL NOT NULL, progress BLOB, place INTEGER NOT NULL, payload BLOB);
CREATE UNIQUE INDEX IF NOT EXISTS daskserve_tasks_ids ON daskserve_tasks (queue, id);
CREATE INDEX IF NOT EXISTS daskserve_tasks_delayed ON daskserve_tasks (queue, due_at) WHERE place = {DELAYED};
CREATE INDEX IF NOT EXISTS daskserve_tasks_ready ON daskserve_tasks (queue, priority DESC, due_at, number)
    WHERE place = {READY};
CREATE INDEX IF NOT EXISTS daskserve_tasks_running ON daskserve_tasks (queue, lease_until)
    WHERE place = {RUNNING};
CREATE INDEX IF NOT EXISTS daskserve_tasks_over ON daskserve_tasks (queue, expires_at) WHERE place = {OVER};
CREATE TABLE IF NOT EXISTS daskserve_task_payloads (number INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS daskserve_task_counts (
    queue TEXT NOT NULL, state TEXT NOT NULL, amount INTEGER NOT NULL, PRIMARY KEY (queue, state))
    WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS daskserve_task_added AFTER INSERT ON daskserve_tasks BEGIN
    INSERT INTO daskserve_task_counts VALUES (new.queue, new.state, 1)
    ON CONFLICT DO UPDATE SET amount = amount + 1; END;
CREATE TRIGGER IF NOT EXISTS daskserve_task_changed AFTER UPDATE OF state ON daskserve_tasks
WHEN old.state <> new.state BEGIN
    UPDATE daskserve_task_counts SET amount = amount - 1 WHERE queue = old.queue AND state = old.state;
    INSERT INTO daskserve_task_counts VALUES (new.queue, new.state, 1)
    ON CONFLICT DO UPDATE SET amount = amount + 1; END;
CREATE TRIGGER IF NOT EXISTS daskserve_task_removed AFTER DELETE ON daskserve_tasks BEGIN
    UPDATE daskserve_task_counts SET amount = amount - 1 WHERE queue = old.queue AND state = old.state;
    DELETE FROM daskserve_task_payloads WHERE number = old.number; END;
"""
INSERT = (
    f"INSERT INTO daskserve_tasks ({', '.join(COLUMNS)}, place, payload) "
    f"VALUES ({', '.join('?' * (len(COLUMNS) + 2))})"
)
UPDATE = (
    f"UPDATE daskserve_tasks SET {', '.join(f'{each} = ?' for each in CHANGED)}, place = ? "
    "WHERE queue = ? AND id = ? AND revision = ?"
)
SELECT = (
    f"SELECT {', '.join(f't.{each}' for each in COLUMNS)}, coalesce(t.payload, p.payload) "
    "FROM daskserve_tasks t LEFT JOIN daskserve_task_payloads p USING (number) "
)


class SqliteQueue:
    """A `daskserve.data.tasks.queues.protocol.TaskQueue` in an SQLite file."""

    def __init__(self, path: Path, *, synchronous: bool = True) -> None:
        self.path = path
        self._synchronous = synchronous
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        #: The process that opened the connection, which must not be used in a fork.
        self._pid = 0

    def __repr__(self) -> str:
        return f"<SqliteQueue {self.path}>"

    # ---- lifecycle

    def open(self) -> None:
        with self._lock, self._translated():
            self._opened()

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None and self._pid == os.getpid():
                connection.close()

    def sync(self, synchronous: bool) -> None:
        """Set whether the following changes wait for the disk."""
        with self._lock, self._translated():
            if synchronous != self._synchronous:
                self._opened().execute(_synced(synchronous))
                self._synchronous = synchronous

    def spare(self, until: float) -> None:
        """Extend all leases to a time, because consumers could not renew them while the file was closed."""
        with self._transaction() as connection:
            connection.execute(
                f"UPDATE daskserve_tasks SET lease_until = ? WHERE place = {RUNNING} AND lease_until < ?",
                (until, until),
            )

    def _opened(self) -> sqlite3.Connection:
        connection = self._connection
        if connection is not None and self._pid == os.getpid():
            return connection
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.touch(mode=0o600, exist_ok=True)  # other users must not read the arguments
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if found > FORMAT:
                raise TaskQueueError(
                    f"{self.path} was written by a newer daskserve (format {found}, known: {FORMAT}); use "
                    "that version, or another file."
                )
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(_synced(self._synchronous))
            if found < FORMAT:
                connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        except BaseException:
            connection.close()
            raise
        self._connection, self._pid = connection, os.getpid()
        return connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise TaskQueueError(
                f"The queue of tasks in {self.path} cannot be used: {error}. It must be a file of SQLite, on "
                "a disk of this machine, that this user may write."
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._translated():
            connection = self._opened()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._translated():
            yield self._opened()

    # ---- submitting

    def add(self, tasks: Sequence[Task], max_waiting: int, now: float) -> list[tuple[Task, bool]]:
        with self._transaction() as connection:
            found: list[tuple[Task, bool]] = []
            room: dict[str, int] = {}
            for task in tasks:
                kept = _find(connection, task.queue, task.id)
                if kept is not None and not (kept.has_ended and kept.expires_at <= now):
                    check_same(kept, task)
                    found.append((kept, False))
                    continue
                if kept is not None:
                    key = (task.queue, task.id)
                    connection.execute("DELETE FROM daskserve_tasks WHERE queue = ? AND id = ?", key)
                if task.queue not in room:
                    room[task.queue] = _waiting(connection, task.queue)
                check_room(task.queue, room[task.queue], 1, max_waiting)
                room[task.queue] += 1
                _insert(connection, task, now)
                found.append((task, True))
            return found

    # ---- consuming

    def claim(self, queue: str, owner: str, limit: int, now: float, lease_s: float) -> list[Task]:
        with self._reading() as connection:
            # checked without a lock, because most consumers are idle
            if not _has_due(connection, queue, now):
                return []
        with self._transaction() as connection:
            connection.execute(
                f"UPDATE daskserve_tasks SET place = {READY} "
                f"WHERE place = {DELAYED} AND queue = ? AND due_at <= ?",
                (queue, now),
            )
            rows = connection.execute(
                f"{SELECT} WHERE t.place = {READY} AND t.queue = ? "
                "ORDER BY t.priority DESC, t.due_at, t.number LIMIT ?",
                (queue, limit),
            ).fetchall()
            tasks = [claimed(_task(row), owner, now, lease_s) for row in rows]
            for task in tasks:
                _update(connection, task, now)
            return tasks

    def renew(self, queue: str, owner: str, ids: Iterable[str], until: float) -> None:
        with self._transaction() as connection:
            connection.executemany(
                "UPDATE daskserve_tasks SET lease_until = ? "
                f"WHERE queue = ? AND id = ? AND owner = ? AND place = {RUNNING}",
                [(until, queue, id, owner) for id in ids],
            )

    def held(self, queue: str, owner: str) -> list[Lease]:
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT id, attempts, is_cancelled FROM daskserve_tasks "
                f"WHERE place = {RUNNING} AND queue = ? AND owner = ?",
                (queue, owner),
            ).fetchall()
            return [Lease(id, attempts, bool(is_cancelled)) for id, attempts, is_cancelled in rows]

    def write(self, changes: Sequence[Change]) -> list[bool]:
        with self._transaction() as connection:
            # Waiting tasks are promoted once they are due.
            written = [_update(connection, change.task, 0.0) for change in changes]
            for (_, letter), is_written in zip(changes, written, strict=True):
                if is_written and letter is not None and _find(connection, letter.queue, letter.id) is None:
                    _insert(connection, letter, letter.due_at)
            return written

    def note(self, queue: str, id: str, attempts: int, progress: bytes) -> None:
        with self._transaction() as connection:
            connection.execute(
                "UPDATE daskserve_tasks SET progress = ? "
                f"WHERE queue = ? AND id = ? AND attempts = ? AND place = {RUNNING}",
                (progress, queue, id, attempts),
            )

    # ---- maintenance

    def expired(self, queue: str, now: float, limit: int) -> list[Task]:
        with self._reading() as connection:
            rows = connection.execute(
                f"{SELECT} WHERE t.place = {RUNNING} AND t.queue = ? AND t.lease_until <= ? LIMIT ?",
                (queue, now, limit),
            ).fetchall()
            return [_task(row) for row in rows]

    def purge(self, queue: str, now: float, limit: int) -> int:
        where = f"place = {OVER} AND queue = ? AND expires_at <= ? LIMIT ?"
        with self._reading() as connection:
            if not connection.execute(
                f"SELECT 1 FROM daskserve_tasks WHERE {where}", (queue, now, 1)
            ).fetchone():
                return 0
        with self._transaction() as connection:
            return connection.execute(
                f"DELETE FROM daskserve_tasks WHERE number IN "
                f"(SELECT number FROM daskserve_tasks WHERE {where})",
                (queue, now, limit),
            ).rowcount

    # ---- reading

    def get(self, queue: str, ids: Sequence[str]) -> list[Task | None]:
        with self._reading() as connection:
            return [_find(connection, queue, id) for id in ids]

    def tasks(self, queue: str, state: TaskState, limit: int) -> list[Task]:
        with self._reading() as connection:
            rows = connection.execute(
                f"{SELECT} WHERE t.queue = ? AND t.state = ? LIMIT ?", (queue, state, limit)
            ).fetchall()
            return [_task(row) for row in rows]

    def ready(self, queue: str, now: float) -> int:
        """Return how many tasks could run."""
        with self._reading() as connection:
            found: int = connection.execute(
                f"SELECT (SELECT count(*) FROM daskserve_tasks WHERE place = {READY} AND queue = ?) + "
                f"(SELECT count(*) FROM daskserve_tasks WHERE place = {DELAYED} AND queue = ? "
                "AND due_at <= ?)",
                (queue, queue, now),
            ).fetchone()[0]
            return found

    def names(self) -> list[str]:
        """Return the names of the queues that have tasks."""
        with self._reading() as connection:
            rows = connection.execute("SELECT DISTINCT queue FROM daskserve_task_counts WHERE amount > 0")
            return sorted(name for (name,) in rows)

    def stats(self, queue: str, now: float) -> QueueStats:
        with self._reading() as connection:
            counts = dict(
                connection.execute(
                    "SELECT state, amount FROM daskserve_task_counts WHERE queue = ?", (queue,)
                ).fetchall()
            )
            oldest = connection.execute(
                "SELECT min(due_at) FROM (SELECT min(due_at) AS due_at FROM daskserve_tasks "
                f"WHERE place = {READY} AND queue = ? UNION ALL SELECT min(due_at) FROM daskserve_tasks "
                f"WHERE place = {DELAYED} AND queue = ?)",
                (queue, queue),
            ).fetchone()[0]
        return QueueStats(counts, 0.0 if oldest is None else max(0.0, now - oldest))


def _synced(synchronous: bool) -> str:
    return f"PRAGMA synchronous = {'FULL' if synchronous else 'NORMAL'}"


def _place(task: Task, now: float) -> int:
    if task.state in WAITING:
        return DELAYED if task.due_at > now else READY
    return OVER if task.state in ENDED else RUNNING


def _values(task: Task, names: Sequence[str]) -> list[Any]:
    return [getattr(task, each) for each in names]


def _task(row: Sequence[Any]) -> Task:
    values = dict(zip((*COLUMNS, "payload"), row, strict=True))
    values["state"] = TaskState(values["state"])
    values["is_cancelled"] = bool(values["is_cancelled"])
    return Task(**values)


def _find(connection: sqlite3.Connection, queue: str, id: str) -> Task | None:
    row = connection.execute(f"{SELECT} WHERE t.queue = ? AND t.id = ?", (queue, id)).fetchone()
    return None if row is None else _task(row)


def _has_due(connection: sqlite3.Connection, queue: str, now: float) -> bool:
    found: int = connection.execute(
        f"SELECT EXISTS (SELECT 1 FROM daskserve_tasks WHERE place = {READY} AND queue = ?) OR "
        f"EXISTS (SELECT 1 FROM daskserve_tasks WHERE place = {DELAYED} AND queue = ? AND due_at <= ?)",
        (queue, queue, now),
    ).fetchone()[0]
    return bool(found)


def _waiting(connection: sqlite3.Connection, queue: str) -> int:
    states = [str(each) for each in WAITING]
    found: int = connection.execute(
        f"SELECT coalesce(sum(amount), 0) FROM daskserve_task_counts "
        f"WHERE queue = ? AND state IN ({', '.join('?' * len(states))})",
        (queue, *states),
    ).fetchone()[0]
    return found


def _insert(connection: sqlite3.Connection, task: Task, now: float) -> None:
    is_large = len(task.payload) > INLINE_BYTES
    values = [*_values(task, COLUMNS), _place(task, now), None if is_large else task.payload]
    number = connection.execute(INSERT, values).lastrowid
    if is_large:
        connection.execute("INSERT INTO daskserve_task_payloads VALUES (?, ?)", (number, task.payload))


def _update(connection: sqlite3.Connection, task: Task, now: float) -> bool:
    """Write a task after a transition, if the stored revision is the previous one."""
    values = [*_values(task, CHANGED), _place(task, now), task.queue, task.id, task.revision - 1]
    return connection.execute(UPDATE, values).rowcount == 1
