"""The task queues of an instance, in the process of its store, which is the scheduler on a real cluster.

The class that stores the tasks is in a layer above, and is imported in a thread at the first call. Calls and
answers are plain values. Tasks are bytes here, and are never unpickled.

Idle consumers wait here for tasks, because polls of hundreds of consumers would keep the scheduler busy. A
new task wakes one of them.
"""

from __future__ import annotations

import asyncio
import importlib
import tempfile
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from daskserve.cluster.protocols.tasks import TaskQueueHost
from daskserve.cluster.store.errors import without_password
from daskserve.cluster.store.opening import is_in_memory
from daskserve.cluster.store.thread import BlockingCalls
from daskserve.common.types import InstanceName
from daskserve.errors import BadRequestError

#: Import path of the class that keeps the tasks in a file.
HOSTED = "daskserve.data.tasks.queues.hosted:HostedQueues"
#: Suffixes of the files of an SQLite database: none, its log, and its shared memory.
SUFFIXES = ("", "-wal", "-shm")
#: The calls that may add tasks.
_ADDING = frozenset({"add", "write"})


class _Wait:
    """The consumers that wait for tasks of one queue."""

    def __init__(self) -> None:
        #: One future for each consumer, in the order of arrival.
        self.turns: deque[asyncio.Future[None]] = deque()
        self.has_changed = asyncio.Event()
        self.watch: asyncio.Future[None] | None = None


class InstanceTaskQueues:
    """The queues of one instance, opened by the first `call`.

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
        self._hosted: TaskQueueHost | None = None
        self._waits: dict[str, _Wait] = {}

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of `daskserve.data.tasks.queues.hosted.HostedQueues`.

        Raises
        ------
        BadRequestError
            The instance's store is of a kind that cannot keep tasks.
        """
        if method == "wait":
            return await self._wait(*arguments)
        if not self._calls.is_open:
            self._calls.start()
        found = await self._calls.run(self._answer, method, arguments)
        if method in _ADDING:
            for each in self._waits.values():
                each.has_changed.set()
        return found

    async def _wait(self, queue: str, interval_s: float, timeout_s: float) -> bool:
        """Wait for a task, up to ``timeout_s``; return whether there may be one.

        While consumers wait, the queue is checked for tasks that have become due every ``interval_s``.
        """
        wait = self._waits.get(queue)
        if wait is None:
            wait = self._waits[queue] = _Wait()
            wait.watch = asyncio.ensure_future(self._watch(queue, wait, interval_s))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wait.turns.append(turn)
        wait.has_changed.set()
        try:
            await asyncio.wait_for(turn, timeout_s)
        except TimeoutError:
            return False
        finally:
            if not turn.done() or turn.cancelled():
                with suppress(ValueError):
                    wait.turns.remove(turn)
        return True

    async def _watch(self, queue: str, wait: _Wait, interval_s: float) -> None:
        """Wake consumers while any of them waits: as many as the queue has tasks."""
        try:
            while wait.turns:
                wait.has_changed.clear()
                count = await self.call("ready", [queue])
                while count > 0 and wait.turns:
                    turn = wait.turns.popleft()
                    if not turn.done():
                        turn.set_result(None)
                        count -= 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(wait.has_changed.wait(), interval_s)
        except Exception as error:  # the file cannot be read
            for turn in wait.turns:
                if not turn.done():
                    turn.set_exception(error)
        finally:
            del self._waits[queue]

    async def close(self) -> None:
        """Close the file; remove it if the instance's store is in memory."""
        for each in list(self._waits.values()):
            if each.watch is not None:
                each.watch.cancel()
            for turn in each.turns:
                if not turn.done():
                    turn.set_result(None)  # the consumer's next call gets the error
        await self._calls.stop(self._close)

    def _answer(self, method: str, arguments: Sequence[Any]) -> Any:
        if self._hosted is None:
            path = file_of(self._url, self._instance, self._start_id)
            if is_in_memory(self._url):
                # The file is removed even if the process ends before the instance does.
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
        # The start id cannot be guessed, so no other user can have created the file.
        return Path(tempfile.gettempdir(), f"daskserve-{name}-{start_id}.tasks")
    scheme, _, path = url.partition("://")
    if scheme != "sqlite":
        raise BadRequestError(
            f"The instance keeps its records in {without_password(url)}, which cannot store tasks. Start it "
            "with a store such as sqlite:////var/lib/serve.db, or store the queue elsewhere with "
            "adapter_config=serve.tasks.RedisAdapterConfig(...) or "
            "serve.tasks.SQLiteAdapterConfig(path=...)."
        )
    store = Path(path.removeprefix("/")).absolute()
    return store.with_name(f"{store.name}.{name}.tasks")


def _remove(path: Path) -> None:
    for suffix in SUFFIXES:
        with suppress(OSError):
            Path(f"{path}{suffix}").unlink()
