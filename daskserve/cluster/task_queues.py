"""The queues of tasks of an instance, in the process that has its store: on a cluster, the scheduler.

What keeps the tasks is in a layer above this one, and is imported in a thread at the first call. Calls and
answers are plain values. Tasks pass through as bytes and are never unpickled here.
"""

from __future__ import annotations

import importlib
import tempfile
import uuid
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from daskserve.cluster.store.errors import without_password
from daskserve.cluster.store.opening import is_in_memory
from daskserve.cluster.store.thread import BlockingCalls
from daskserve.common.types import InstanceName
from daskserve.errors import BadRequestError

#: Import path of the class that keeps the tasks in a file.
HOSTED = "daskserve.data.tasks.queues.hosted:HostedQueues"
#: What SQLite adds to the name of a file for its log and its shared memory.
SUFFIXES = ("", "-wal", "-shm")


class Hosted(Protocol):
    """Queues of tasks in a file; any thread may call the methods, one at a time."""

    def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the queues with plain values."""

    def close(self) -> None:
        """Close the file."""


class InstanceTaskQueues:
    """The queues of one instance; nothing until the first `call`.

    Parameters
    ----------
    url : str
        The URL of the instance's store.
    start_id : str
        The start of the instance. It is the same after the instance has outlived a scheduler.
    """

    def __init__(self, url: str, instance: InstanceName, start_id: str = "") -> None:
        self._url, self._instance = url, instance
        self._start_id = start_id or uuid.uuid4().hex
        self._calls = BlockingCalls(url, instance)
        self._hosted: Hosted | None = None

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of `daskserve.data.tasks.queues.hosted.HostedQueues`.

        Raises
        ------
        BadRequestError
            The instance's store is of a kind that cannot keep tasks.
        """
        if not self._calls.is_open:
            self._calls.start()
        return await self._calls.run(self._answer, method, arguments)

    async def close(self) -> None:
        """Close the file; remove it if it has the tasks of an instance whose store is in memory."""
        await self._calls.stop(self._close)

    def _answer(self, method: str, arguments: Sequence[Any]) -> Any:
        if self._hosted is None:
            path = file_of(self._url, self._instance, self._start_id)
            if is_in_memory(self._url):
                # Also if the process ends without an end of the instance.
                weakref.finalize(self, _remove, path)
            module, _, name = HOSTED.partition(":")
            self._hosted = getattr(importlib.import_module(module), name)(path)
        return self._hosted.answer(method, arguments)

    def _close(self) -> None:
        hosted, self._hosted = self._hosted, None
        if hosted is None:
            return
        hosted.close()
        if is_in_memory(self._url):
            _remove(file_of(self._url, self._instance, self._start_id))


def file_of(url: str, instance: InstanceName, start_id: str) -> Path:
    """Return the file with the tasks of an instance: beside its store, or a temporary one.

    Raises
    ------
    BadRequestError
        The store is of a kind that cannot keep tasks.
    """
    name = quote(instance, safe="")
    if is_in_memory(url):
        # The start id cannot be guessed, so the file is this user's.
        return Path(tempfile.gettempdir(), f"daskserve-{name}-{start_id}.tasks")
    scheme, _, path = url.partition("://")
    if scheme != "sqlite":
        raise BadRequestError(
            f"The instance keeps its records in {without_password(url)}, which cannot keep tasks. Start it "
            "with a store such as sqlite:////var/lib/serve.db, or give the queue a place of its own with "
            "adapter_config=serve.RedisAdapterConfig(...) or serve.SQLiteAdapterConfig(path=...)."
        )
    store = Path(path.removeprefix("/")).absolute()
    return store.with_name(f"{store.name}.{name}.tasks")


def _remove(path: Path) -> None:
    for suffix in SUFFIXES:
        with suppress(OSError):
            Path(f"{path}{suffix}").unlink()


def task_verbs(
    find: Callable[[InstanceName], InstanceTaskQueues],
) -> dict[str, Callable[..., Awaitable[Any]]]:
    """Return the supervisor's verb for queues of tasks, given those of each instance."""

    async def call(instance: InstanceName, method: str, arguments: Sequence[Any]) -> Any:
        return await find(instance).call(method, arguments)

    return {"call_task_queue": call}
