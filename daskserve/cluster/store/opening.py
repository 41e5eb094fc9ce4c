"""Opening a store, which keeps the durable records of an instance.

The scheduler process opens one store per instance. A store maps keys to bytes and does not interpret them. A
commit is one transaction, made by one controller epoch. The store refuses an epoch older than the newest it
has seen, so a replaced controller cannot change anything.

================  ==========================================  =============================================
URL               an acknowledged commit survives             two schedulers that share it are fenced
================  ==========================================  =============================================
memory://         every process but the scheduler             nothing is shared
sqlite:///path    SIGKILL, power loss                         exactly, by a lock around every commit
any of fsspec     SIGKILL, power loss (local folders are      exactly where creation is exclusive
                  synced); else what the service promises     (see `daskserve.cluster.store.fsspec`)
================  ==========================================  =============================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from daskserve.cluster.protocols.stores import StoreChange, StoreOwnership
from daskserve.cluster.store.errors import (
    StoreError,
    StoreFormatError,
    StoreUnavailableError,
    stale,
    without_password,
)
from daskserve.cluster.store.thread import BlockingCalls, ThreadedStore
from daskserve.common.types import InstanceName
from daskserve.errors import BadRequestError

__all__ = [
    "MemoryStore",
    "StoreError",
    "StoreFormatError",
    "StoreUnavailableError",
    "is_in_memory",
    "open_store",
]


class MemoryStore:
    """A store in the scheduler's memory; its records survive every process but the scheduler."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}
        self._epoch = 0

    async def open(self) -> None:
        """Do nothing; memory needs no opening."""

    async def close(self) -> None:
        """Do nothing; the records are freed with this object."""

    async def load(self) -> Mapping[str, bytes]:
        return dict(self._records)

    async def commit(self, epoch: int, change: StoreChange) -> None:
        if epoch < self._epoch:
            raise stale(epoch, self._epoch)
        self._epoch = epoch
        for key, value in change.records.items():
            if value is None:
                self._records.pop(key, None)
            else:
                self._records[key] = value

    async def rewrite(self, epoch: int, change: StoreChange, unreadable: Sequence[str] = ()) -> None:
        if epoch < self._epoch:
            raise stale(epoch, self._epoch)
        self._epoch = epoch
        kept = {key: self._records[key] for key in unreadable if key in self._records}
        self._records = {**kept, **{key: each for key, each in change.records.items() if each is not None}}

    async def newest_epoch(self) -> int:
        return self._epoch

    async def claim_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def problems(self) -> Mapping[str, str]:
        return {}

    @property
    def ownership(self) -> StoreOwnership:
        return StoreOwnership.HELD

    def learn(self, condition: Mapping[str, Any]) -> None:
        """Do nothing: this object determines the condition."""

    async def take_over(
        self, epoch: int, *, is_complete: bool, own: Sequence[str]
    ) -> Mapping[str, bytes | None] | None:
        return {}

    async def release(self, *, gives_back: bool = False) -> None:
        """Do nothing: no other cluster has these records."""


def is_in_memory(url: str) -> bool:
    """Return whether the records of a store at a URL are lost with the scheduler."""
    return url.startswith("memory:")


def open_store(url: str, instance: InstanceName) -> MemoryStore | ThreadedStore:
    """Return the store of one instance at a URL; open it with ``await open()``.

    Parameters
    ----------
    url : str
        ``memory://``; ``sqlite:///relative.db`` or ``sqlite:////absolute.db``; or the URL of a folder that
        fsspec supports, such as ``file:///folder`` or ``s3://bucket/folder``. Paths are those of the process
        that opens the store: the Dask scheduler.
    instance : str
        The instance that owns the records. Several instances may share one file or folder; each sees only
        its own records.

    Raises
    ------
    BadRequestError
        The URL is not a store URL. Errors of the file or folder itself come from ``open()``.
    """
    scheme, colon, rest = url.partition("://")
    if scheme == "memory":
        if rest:
            raise BadRequestError(
                f"Store URL {url!r} has a path, but memory:// takes none; use sqlite:///path or "
                "file:///folder for records that outlive the scheduler."
            )
        return MemoryStore()
    if scheme == "sqlite":
        return _sqlite_store(url, rest, instance)
    if not colon:
        raise BadRequestError(f"Store URL {url!r} has no scheme; for a folder write file:///path/to/folder.")
    return _fsspec_store(url, instance)


def _sqlite_store(url: str, rest: str, instance: InstanceName) -> ThreadedStore:
    from daskserve.cluster.store.sqlite import SqliteStore

    path = rest.removeprefix("/")
    if path == rest or not path or path == ":memory:":
        raise BadRequestError(
            f"Store URL {url!r} names no file; write sqlite:///relative/path.db, sqlite:////absolute/path.db "
            "or memory:// for records that need not outlive the scheduler."
        )
    return ThreadedStore(SqliteStore(url, instance, path), BlockingCalls(url, instance))


def _fsspec_store(url: str, instance: InstanceName) -> ThreadedStore:
    import fsspec

    from daskserve.cluster.store.fsspec import FsspecStore

    scheme = urlsplit(url.partition("::")[0]).scheme or url.partition("::")[0]
    if scheme not in fsspec.available_protocols():
        raise BadRequestError(
            f"Store URL {without_password(url)!r} has an unknown scheme {scheme!r}; use memory://, "
            "sqlite:///path or a scheme of fsspec, such as file:///folder or s3://bucket/folder."
        )
    calls = BlockingCalls(url, instance)
    return ThreadedStore(FsspecStore(url, instance, calls), calls)
