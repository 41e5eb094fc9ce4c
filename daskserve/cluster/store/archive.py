"""Whole stores, for operators: reads all instances of a store, and writes backups to one file.

A backup is an object as `daskserve.cluster.store.journal` encodes it: a header that names the instances and
their epochs, then every record with its checksum. It does not depend on the kind of the store.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from daskserve.cluster.store.access import opener
from daskserve.cluster.store.errors import StoreError, check_format, without_password
from daskserve.cluster.store.folder_claims import epochs_in
from daskserve.cluster.store.folders import connect, folders_at, translated_errors
from daskserve.cluster.store.fsspec import FsspecStore, folder_of, instance_in, user_of
from daskserve.cluster.store.journal import DamagedError, decode_object, encode_object
from daskserve.cluster.store.opening import is_in_memory, open_store
from daskserve.cluster.store.reading import read_journal
from daskserve.cluster.store.sqlite import FORMAT, SqliteStore, translate
from daskserve.cluster.store.sqlite_files import check_not_empty
from daskserve.cluster.store.sqlite_log import log_of, size_of
from daskserve.cluster.store.sqlite_rows import DAMAGED, format_of, is_sound, lack_of, scan
from daskserve.cluster.store.thread import ThreadedStore
from daskserve.common.types import InstanceName
from daskserve.errors import BadRequestError

#: Offset at which an SQLite file states whether it needs a log (2) or not (1).
READ_VERSION_AT = 19


@dataclass(slots=True)
class StoredInstance:
    """The content of a store, or of a backup, for one instance.

    Attributes
    ----------
    problems : dict
        Damaged records and objects by name, each with the reason.
    """

    epoch: int
    records: dict[str, bytes] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class StoreContents:
    """All instances of a store. ``lack`` describes missing parts; it is empty if no parts are missing."""

    instances: dict[InstanceName, StoredInstance]
    lack: str = ""


def blocking_store(url: str, instance: InstanceName) -> SqliteStore | FsspecStore:
    """Return the store of an instance, for use in this thread only.

    Raises
    ------
    BadRequestError The URL does not name a store that other processes can use.
    """
    if is_in_memory(url):
        raise BadRequestError(
            f"The store {url!r} is in a scheduler's memory, which no other process can read. Start the "
            "instance with store=..., and back up that store."
        )
    store = open_store(url, instance)
    assert isinstance(store, ThreadedStore)
    assert isinstance(store.blocking, (SqliteStore, FsspecStore))
    return store.blocking


def exists(url: str) -> bool:
    """Return whether there is a store at a URL, even a damaged one."""
    store = blocking_store(url, "default")
    if isinstance(store, SqliteStore):
        return size_of(store.path) is not None
    return bool(_folders(url))


def read_store(url: str) -> StoreContents:
    """Return the contents of a store, without changing it, even while an instance uses it.

    Raises
    ------
    StoreError
        There is no store, or it cannot be read at all.
    """
    store = blocking_store(url, "default")
    if not exists(url):
        raise StoreError(f"There is no store at {store.url}.")
    if isinstance(store, FsspecStore):
        return _read_folders(url)
    with translated_sqlite_errors(store):
        return _read_file(store)


def user_at(url: str, instances: Sequence[InstanceName]) -> str:
    """Return the process that may still use a store; empty if there is none."""
    store = blocking_store(url, "default")
    if isinstance(store, FsspecStore):
        with translated_errors(store.url):
            folders = _folders(url)
            users = [user_of(connect(url, folders[each])) for each in instances if each in folders]
        return next(filter(None, users), "")
    if not size_of(store.path):
        return ""
    with translated_sqlite_errors(store), contextlib.closing(_connected(store.path, "mode=rw")) as db:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        try:
            db.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            return "another process, which has the file open"
        db.execute("ROLLBACK")
    return ""


# ---- reading


def _connected(path: Path, parameters: str) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?{parameters}"
    found = sqlite3.connect(uri, uri=True, timeout=0 if "rw" in parameters else 5.0, isolation_level=None)
    found.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    return found


@contextlib.contextmanager
def translated_sqlite_errors(store: SqliteStore) -> Iterator[None]:
    """Translate SQLite's errors into those of a store."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(store.url, error) from error


def _read_file(store: SqliteStore) -> StoreContents:
    check_not_empty(store.url, store.path)
    log_size = size_of(log_of(store.path))
    how, keeps_log = "mode=ro", None
    if log_size is None:
        # No process has the file open. Without this, SQLite would leave an empty log behind, perhaps with
        # another owner.
        how += "&immutable=1"
        with open(store.path, "rb") as file:
            keeps_log = file.read(READ_VERSION_AT + 1)[READ_VERSION_AT:] == b"\x02"
    with contextlib.closing(_connected(store.path, how)) as db:
        db.execute("BEGIN")
        found = StoreContents({}, lack_of(db, had_log=bool(log_size), keeps_log=keeps_log))
        version = format_of(db)
        if version is None:
            return found
        check_format(store.url, version, FORMAT)
        epochs = db.execute("SELECT instance, epoch FROM daskserve_epochs").fetchall()
        names = [name for (name,) in db.execute("SELECT DISTINCT instance FROM daskserve_records")]
        for name, epoch in {**dict.fromkeys(names, 0), **dict(epochs)}.items():
            instance = found.instances[name] = StoredInstance(epoch)
            rows, instance.problems = scan(db, name)
            for _, key, value, crc in rows:
                if is_sound(key, value, crc):
                    instance.records[key] = value
                else:
                    instance.problems[str(key)] = DAMAGED
            aside = db.execute("SELECT key, reason FROM daskserve_aside WHERE instance = ?", (name,))
            for key, reason in aside:
                if key not in instance.records:
                    instance.problems[str(key)] = f"{reason} It was set aside by an earlier start."
        checked = [text for (text,) in db.execute("PRAGMA integrity_check(3)")]
        if checked != ["ok"] and not found.lack:
            found.lack = f"SQLite finds the file damaged ({'; '.join(checked)})"
    return found


def _folders(url: str) -> dict[InstanceName, str]:
    """Return the folders of the instances at a URL."""
    found = {}
    for name in folders_at(url):
        instance = instance_in(name)
        if folder_of(instance) == name:
            folder = connect(url, name)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if folder.names("format") or folder.names("txn") or folder.names("snapshot"):
                    found[instance] = name
    return found


def _read_folders(url: str) -> StoreContents:
    shown = without_password(url)
    found = StoreContents({})
    with translated_errors(shown):
        for instance, name in _folders(url).items():
            folder = connect(url, name)
            epochs = epochs_in(folder.names("epoch"))
            journal, reader = read_journal(shown, folder, keeps_copies=False)
            epoch = max([journal.last.epoch, *epochs])
            found.instances[instance] = StoredInstance(epoch, dict(journal.records), dict(reader.problems))
            if reader.missing:
                found.lack = f"changes of instance {instance!r} are missing: {', '.join(reader.missing)}"
    return found


# ---- backups


def write_backup(path: Path, instances: Mapping[InstanceName, StoredInstance]) -> int:
    """Atomically replace a file with a backup of instances; return its size."""
    names = list(instances)
    header = {
        "kind": "backup",
        "instances": [{"name": name, "epoch": instances[name].epoch} for name in names],
    }
    records: dict[str, bytes | None] = {
        f"{number}/{key}": value
        for number, name in enumerate(names)
        for key, value in sorted(instances[name].records.items())
    }
    data = encode_object(header, records)
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with open(new, "xb", opener=opener) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        raise StoreError(f"The backup {path} cannot be written: {error}.") from error
    finally:
        with contextlib.suppress(OSError):  # the failure to write was already reported
            new.unlink()
    return len(data)


def read_backup(path: Path) -> StoreContents:
    """Return the contents of a backup.

    Raises
    ------
    StoreError
        It cannot be read, or any part of it is damaged.
    """
    try:
        header, records = decode_object(str(path), path.read_bytes(), "backup")
        found = [StoredInstance(each["epoch"]) for each in header["instances"]]
        for key, value in records.items():
            number, _, name = key.partition("/")
            assert value is not None
            found[int(number)].records[name] = value
        return StoreContents(
            {each["name"]: one for each, one in zip(header["instances"], found, strict=True)}
        )
    except OSError as error:
        raise StoreError(f"The backup {path} cannot be read: {error}.") from error
    except StoreError:
        raise
    except DamagedError as error:
        raise StoreError(f"The file {path} is not a usable backup: {error}. Use another one.") from error
    except Exception as error:
        # Decoding a file of another kind may raise any error.
        raise StoreError(f"The file {path} is not a usable backup: {error!r}.") from error
