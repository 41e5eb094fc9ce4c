"""Reads an SQLite store without changing it: its format, missing parts, and intact and damaged records."""

from __future__ import annotations

import sqlite3
import zlib
from typing import Any, TypeAlias

from daskserve.cluster.store.sqlite_log import missing

DAMAGED = "The record was damaged in the file (its checksum differs)."

#: A row's id, key, value and checksum; damage may change their types.
StoredRow: TypeAlias = tuple[int, Any, Any, Any]


def format_of(db: sqlite3.Connection) -> int | None:
    """Return the format of the store in a file; None if it has none."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'daskserve_meta'").fetchone() is None:
        return None
    row = db.execute("SELECT value FROM daskserve_meta WHERE name = 'format'").fetchone()
    return None if row is None else int(row[0])


def lack_of(db: sqlite3.Connection, *, had_log: bool, keeps_log: bool | None = None) -> str:
    """Return what is missing in a file, before anything is written to it; see `missing`.

    ``keeps_log`` says whether the file uses a write-ahead log, if SQLite cannot determine it.
    """
    if format_of(db) is not None:
        return missing(db, had_log=had_log)
    if keeps_log is None:
        keeps_log = db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    is_bare = db.execute("SELECT 1 FROM sqlite_master").fetchone() is None
    # Earlier versions wrote even the tables only to the log.
    return "all of its records were in its log, which is missing" if keeps_log and is_bare else ""


def scan(db: sqlite3.Connection, instance: str) -> tuple[list[StoredRow], dict[str, str]]:
    """Return the rows of an instance, and the reason for each key whose row cannot be read."""
    try:
        found = db.execute(
            "SELECT rowid, key, value, crc FROM daskserve_records WHERE instance = ?", (instance,)
        )
        return found.fetchall(), {}
    except sqlite3.DatabaseError as error:
        if not name_of(error).startswith("SQLITE_CORRUPT"):
            raise
        return _salvage(db, instance)


def _salvage(db: sqlite3.Connection, instance: str) -> tuple[list[StoredRow], dict[str, str]]:
    """Read a damaged file record by record."""
    rows: list[StoredRow] = []
    unreadable = {}
    where = "FROM daskserve_records WHERE instance = ? AND key = ?"
    keys = db.execute(
        "SELECT key FROM daskserve_records WHERE instance = ? ORDER BY key", (instance,)
    ).fetchall()  # this query reads only the index
    for (key,) in keys:
        try:
            rows.extend(db.execute(f"SELECT rowid, key, value, crc {where}", (instance, key)).fetchall())
        except sqlite3.DatabaseError as error:
            unreadable[key] = f"The record cannot be read ({error}). It stays in the file."
    return rows, unreadable


def is_sound(key: Any, value: Any, crc: Any) -> bool:
    """Return whether a row is undamaged."""
    return isinstance(key, str) and isinstance(value, bytes) and checksum(key, value) == crc


def checksum(key: str, value: bytes) -> int:
    """Return the checksum of a record."""
    return zlib.crc32(value, zlib.crc32(key.encode("utf-8", "surrogateescape")))


def name_of(error: sqlite3.Error) -> str:
    """Return SQLite's name of an error; empty if it has none."""
    return getattr(error, "sqlite_errorname", None) or ""
