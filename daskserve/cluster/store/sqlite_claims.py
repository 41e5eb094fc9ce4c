"""Ownership of the records of an instance in an SQLite file: the newest epoch, its owner, and queries.

Each function runs within a transaction of its caller. The tables are separate from those of format 1, because
readers of format 1 ignore them: an epoch that such a reader claims has no owner here.
"""

from __future__ import annotations

import sqlite3

from daskserve.cluster.protocols.stores import Claim
from daskserve.cluster.store.errors import stale, stale_claim
from daskserve.common.types import InstanceName

TABLES = (
    "CREATE TABLE IF NOT EXISTS daskserve_owners (instance TEXT PRIMARY KEY, epoch INTEGER NOT NULL, "
    "owner TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS daskserve_knocks (instance TEXT NOT NULL, by TEXT NOT NULL, "
    "is_answered INTEGER NOT NULL, PRIMARY KEY (instance, by))",
)
_SET_EPOCH = (
    "INSERT INTO daskserve_epochs (instance, epoch) VALUES (?, ?) "
    "ON CONFLICT (instance) DO UPDATE SET epoch = excluded.epoch"
)
_SET_OWNER = (
    "INSERT INTO daskserve_owners (instance, epoch, owner) VALUES (?, ?, ?) "
    "ON CONFLICT (instance) DO UPDATE SET epoch = excluded.epoch, owner = excluded.owner"
)


class SqliteClaims:
    """The claims on one instance's records."""

    def __init__(self, instance: InstanceName) -> None:
        self._instance = instance

    def newest(self, db: sqlite3.Connection) -> int:
        """Return the newest epoch; 0 if there is none."""
        row = db.execute(
            "SELECT epoch FROM daskserve_epochs WHERE instance = ?", (self._instance,)
        ).fetchone()
        return 0 if row is None else int(row[0])

    def advance(self, db: sqlite3.Connection, epoch: int) -> None:
        """Make an epoch the newest one, for its commit; raise if there is a newer one."""
        newest = self.newest(db)
        if epoch < newest:
            raise stale(epoch, newest)
        if epoch > newest:
            db.execute(_SET_EPOCH, (self._instance, epoch))

    def claim(self, db: sqlite3.Connection, after: int | None, owner: str) -> int:
        """Claim the next epoch; see `daskserve.cluster.store.thread.BlockingStore.claim_epoch`."""
        newest = self.newest(db)
        if after is not None and newest != after:
            raise stale_claim(after, newest)
        db.execute(_SET_EPOCH, (self._instance, newest + 1))
        db.execute(_SET_OWNER, (self._instance, newest + 1, owner))
        return newest + 1

    def newest_claim(self, db: sqlite3.Connection) -> Claim:
        """Return the newest claim."""
        # One statement, so that the epoch and its owner belong together.
        row = db.execute(
            "SELECT e.epoch, o.owner FROM daskserve_epochs e LEFT JOIN daskserve_owners o "
            "ON o.instance = e.instance AND o.epoch = e.epoch WHERE e.instance = ?",
            (self._instance,),
        ).fetchone()
        return Claim(0, None) if row is None else Claim(int(row[0]), row[1])

    def has_queries(self, db: sqlite3.Connection) -> bool:
        """Return whether there are queries without an answer."""
        row = db.execute(
            "SELECT 1 FROM daskserve_knocks WHERE instance = ? AND NOT is_answered", (self._instance,)
        ).fetchone()
        return row is not None

    def answer(self, db: sqlite3.Connection) -> None:
        """Answer all queries."""
        db.execute("UPDATE daskserve_knocks SET is_answered = 1 WHERE instance = ?", (self._instance,))

    def query_owner(self, db: sqlite3.Connection, by: str) -> bool:
        """Insert a query, if there is none; return whether it was answered."""
        row = db.execute(
            "SELECT is_answered FROM daskserve_knocks WHERE instance = ? AND by = ?", (self._instance, by)
        ).fetchone()
        if row is None:
            db.execute("INSERT INTO daskserve_knocks VALUES (?, ?, 0)", (self._instance, by))
        return row is not None and bool(row[0])

    def forget(self, db: sqlite3.Connection, by: str) -> None:
        """Remove a query and its answer."""
        db.execute("DELETE FROM daskserve_knocks WHERE instance = ? AND by = ?", (self._instance, by))
