"""Locations for stores and failing file systems, for the tests of the stores."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from daskserve.cluster.protocols.base import InstanceStore, StoreChange
from daskserve.cluster.store import sqlite
from daskserve.cluster.store.folders import Folder, LocalFolder, RemoteFolder
from daskserve.cluster.store.fsspec import FsspecStore, folder_of
from daskserve.cluster.store.journal import Position
from daskserve.cluster.store.opening import MemoryStore, open_store
from daskserve.cluster.store.reading import positions_in
from daskserve.cluster.store.sqlite import SqliteStore
from daskserve.cluster.store.thread import BlockingCalls, ThreadedStore

T = TypeVar("T")
#: Makes a store of an instance at one location; all stores made by it share their records.
MakeStore = Callable[[str], InstanceStore]

DURABLE = ("sqlite", "folder", "bucket", "renames")


def make_bucket() -> Any:
    """Return an in-memory object store with conditional puts and without folders."""

    class Bucket(MemoryFileSystem):
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]
        cachable = False

    return Bucket()


def make_renaming_files() -> Any:
    """Return an in-memory file system that only supports writing and renaming."""

    class Renaming(MemoryFileSystem):
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]
        cachable = False
        pipe_file = AbstractFileSystem.pipe_file

    return Renaming()


def place(kind: str, path: Path) -> MakeStore:
    """Return a store factory for a fresh location of a kind; ``path`` is an empty folder to use."""
    if kind == "memory":
        return lambda instance: MemoryStore()
    if kind == "sqlite":
        return lambda instance: open_store(f"sqlite:///{path}/store.db", instance)
    if kind == "folder":
        return lambda instance: open_store(f"file://{path}/store", instance)
    files = make_bucket() if kind == "bucket" else make_renaming_files()
    return lambda instance: threaded(f"{kind}://store", instance, remote(files))


def threaded(url: str, instance: str, connect: Callable[[str, str], Folder]) -> ThreadedStore:
    """Return a store in the folder that ``connect`` returns."""
    calls = BlockingCalls(url, instance)
    return ThreadedStore(FsspecStore(url, instance, calls, connect), calls)


def blocking(store: InstanceStore) -> FsspecStore:
    """Return the blocking half of a store in a folder."""
    assert isinstance(store, ThreadedStore)
    assert isinstance(store.blocking, FsspecStore)
    return store.blocking


def sqlite_half(store: InstanceStore) -> SqliteStore:
    """Return the blocking half of a store in an SQLite file."""
    assert isinstance(store, ThreadedStore)
    assert isinstance(store.blocking, SqliteStore)
    return store.blocking


@contextlib.contextmanager
def editing(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an SQLite file as another program would."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        yield db


async def in_thread(store: InstanceStore, job: Callable[[], T]) -> T:
    """Run a job in the thread of a store and return its result."""
    assert isinstance(store, ThreadedStore)
    return await store.calls.run(job)


async def compact(store: InstanceStore) -> None:
    """Compact the journal of a store, however short it is."""
    await in_thread(store, lambda: blocking(store).compact(True))


async def positions(store: InstanceStore, name: str) -> list[Position]:
    """Return the positions of the objects in ``txn`` or ``snapshot``."""
    return await in_thread(store, lambda: positions_in(blocking(store)._folder, name))


def remote(files: Any) -> Callable[[str, str], Folder]:
    return lambda url, folder: RemoteFolder(files, f"/store/{folder}")


@contextlib.asynccontextmanager
async def opened(store: InstanceStore) -> AsyncIterator[InstanceStore]:
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def commit(store: InstanceStore, epoch: int, **records: bytes | None) -> Mapping[str, bytes]:
    await store.commit(epoch, StoreChange(records))
    return await store.load()


class Crash(BaseException):
    """A crash of the process. Not an `Exception`, so that no code handles it as an error."""


class Trap:
    """Counts steps and acts at one of them. Each operation has one step before it and one after it.

    Parameters
    ----------
    at : int
        The number of the step, from 0.
    action : callable, optional
        Runs at that step. By default the process crashes, so every later step fails too.
    """

    def __init__(self, at: int, action: Callable[[], object] | None = None) -> None:
        self.at = at
        self.action = action
        self.steps: list[str] = []

    @property
    def has_sprung(self) -> bool:
        return len(self.steps) > self.at

    def step(self, what: str) -> None:
        self.steps.append(what)
        number = len(self.steps) - 1
        if self.action is None and number >= self.at:
            raise Crash(what)
        if self.action is not None and number == self.at:
            self.action()


class TrappedFolder:
    """A folder whose operations step through a trap."""

    def __init__(self, inner: Folder, trap: Trap) -> None:
        self.inner = inner
        self.trap = trap

    def prepare(self, folders: Sequence[str]) -> None:
        self.inner.prepare(folders)

    def create(self, name: str, data: bytes, *, may_wait: bool = False) -> None:
        if name.startswith("closed/"):
            return  # a process that crashes does not close its store
        self.trap.step(f"before {name}")
        self.inner.create(name, data, may_wait=may_wait)
        self.trap.step(f"after {name}")

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        self.trap.step(f"read {', '.join(names)}")
        return self.inner.read(names)

    def has(self, name: str) -> bool:
        self.trap.step(f"look for {name}")
        return self.inner.has(name)

    def names(self, folder: str) -> list[str]:
        self.trap.step(f"list {folder}")
        return self.inner.names(folder)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.trap.step(f"remove {name}")
            self.inner.remove([name])

    def close(self) -> None:
        self.inner.close()


class TrappedConnection(sqlite3.Connection):
    """A connection whose statements step through a trap, unless they only read."""

    trap: Trap

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement.startswith(("SELECT", "PRAGMA")):
            return super().execute(statement, *values)
        self.trap.step(f"before {statement}")
        found = super().execute(statement, *values)
        self.trap.step(f"after {statement}")
        return found

    def executemany(self, statement: str, rows: Any) -> sqlite3.Cursor:
        self.trap.step(f"before {statement}")
        return super().executemany(statement, rows)


@contextlib.contextmanager
def trapped_sqlite(trap: Trap) -> Iterator[None]:
    """Make the stores that the block opens step through a trap; then close their connections."""
    connect, made = sqlite.connect, list[TrappedConnection]()

    def connect_trapped(path: Path, *, any_thread: bool = False) -> sqlite3.Connection:
        if any_thread:  # it only copies the log into the file, in another thread
            return connect(Path(":memory:"), any_thread=True)
        trapped = sqlite3.connect(
            path, timeout=1, isolation_level=None, check_same_thread=False, factory=TrappedConnection
        )
        trapped.trap = trap
        made.append(trapped)
        return trapped

    sqlite.connect = connect_trapped
    try:
        yield
    finally:
        sqlite.connect = connect
        for each in made:
            each.close()


def every_step(run: Callable[[int], bool]) -> int:
    """Call ``run`` with trap positions 0, 1, 2, ... until a trap no longer springs; return that position."""
    at = 0
    while run(at):
        at += 1
    return at


def local_folder(path: Path, instance: str = "i") -> LocalFolder:
    """Return the folder of an instance at a location of the kind ``folder``."""
    return LocalFolder(path / "store" / folder_of(instance))


def folder_store(path: Path, wrap: Callable[[Folder], Folder] = lambda folder: folder) -> ThreadedStore:
    """Return a store at a location of the kind ``folder``; ``wrap`` wraps its folder."""
    return threaded(f"file://{path}/store", "i", lambda url, name: wrap(local_folder(path)))


async def settle(store: InstanceStore) -> None:
    """Wait until the store has finished its background work."""
    for _ in range(20):
        await in_thread(store, lambda: None)
