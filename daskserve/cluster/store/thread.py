"""A store whose work is plain blocking code, done by one thread of its own.

Stores live in the scheduler process, whose event loop must never wait for a disk or a network. One thread
per store, rather than a pool, makes order a matter of course: commits happen in the order they were asked
for, and nothing else ever touches the connection. It is a daemon: a file system that hangs for ever must not
keep the scheduler from ending, and what is being written then was not acknowledged.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from daskserve.cluster.base import StoreChange
from daskserve.cluster.store.errors import without_password
from daskserve.errors import ClosedError
from daskserve.types import InstanceName

logger = logging.getLogger("daskserve.store")

T = TypeVar("T")
P = ParamSpec("P")

#: `ThreadedStore.close` waits this long for work that does not end.
CLOSE_GRACE_S = 10.0


class StoreThread(Executor):
    """One daemon thread that does jobs one by one, in the order they were submitted."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do a job after all that were submitted before."""
        future: Future[T] = Future()
        self._jobs.put((future, lambda: job(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after what was submitted before."""
        self._jobs.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:
                    # The thread's top loop: every error belongs to whoever waits for the job.
                    future.set_exception(error)
            del item, future, job  # an idle thread must not keep a change alive


class ThreadedStore(abc.ABC):
    """The asynchronous half of a store; the blocking half is in the methods that begin with ``do_``.

    Those run in the store's thread only, one at a time. Whatever is not open raises `ClosedError`.

    Attributes
    ----------
    url : str
        What the store was opened by, fit to be shown.
    """

    def __init__(self, url: str, instance: InstanceName) -> None:
        self.url = without_password(url)
        self.instance = instance
        self._thread: StoreThread | None = None
        self._problems: Mapping[str, str] = {}

    def __repr__(self) -> str:
        state = "closed" if self._thread is None else "open"
        return f"<{type(self).__name__} {self.url} {self.instance} {state} problems={len(self._problems)}>"

    # Lifecycle

    async def open(self) -> None:
        """See `InstanceStore.open`."""
        if self._thread is not None:
            return
        self._thread = StoreThread(f"daskserve-store-{self.instance}")
        try:
            await self.run(self.do_open)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See `InstanceStore.close`."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        is_idle = False
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                await asyncio.get_running_loop().run_in_executor(thread, self.do_close)
            is_idle = True
        except TimeoutError:
            logger.warning("Store %s did not close within %s s; it is left behind", self.url, CLOSE_GRACE_S)
        finally:
            # Joining an idle thread takes microseconds; one that hangs is not waited for.
            thread.shutdown(wait=is_idle)

    # What a store does

    async def load(self) -> Mapping[str, bytes]:
        """See `Store.load`."""
        return await self.run(self.do_load)

    async def commit(self, epoch: int, change: StoreChange) -> None:
        """See `Store.commit`."""
        await self.run(self.do_commit, epoch, dict(change.records))

    async def newest_epoch(self) -> int:
        """See `InstanceStore.newest_epoch`."""
        return await self.run(self.do_newest_epoch)

    async def claim_epoch(self) -> int:
        """See `InstanceStore.claim_epoch`."""
        return await self.run(self.do_claim_epoch)

    def problems(self) -> Mapping[str, str]:
        """See `InstanceStore.problems`."""
        return dict(self._problems)

    # For the blocking half

    @property
    def is_closing(self) -> bool:
        """Whether only what was already asked for is still to be done."""
        return self._thread is None

    async def run(self, job: Callable[..., T], *args: Any) -> T:
        """Do something blocking in the store's thread and return its result."""
        if self._thread is None:
            raise ClosedError(f"The store {self.url} of instance {self.instance!r} is not open.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, job, *args)

    def post(self, job: Callable[[], None]) -> None:
        """Do something later, after what was asked for before; to be called in the store's thread."""
        thread = self._thread
        if thread is not None:
            thread.submit(job).add_done_callback(self._note_end)

    def _note_end(self, ended: Future[None]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            logger.error("Work in the background of store %s failed", self.url, exc_info=error)

    def report_problems(self, problems: Mapping[str, str]) -> None:
        """Take over what `problems` answers from now on, and log what is new."""
        for name, reason in problems.items():
            if name not in self._problems:
                logger.error("Store %s, instance %s: %s: %s", self.url, self.instance, name, reason)
        self._problems = dict(problems)

    # The blocking half

    @abc.abstractmethod
    def do_open(self) -> None: ...

    @abc.abstractmethod
    def do_close(self) -> None:
        """Free what `do_open` took, however far it came."""

    @abc.abstractmethod
    def do_load(self) -> Mapping[str, bytes]: ...

    @abc.abstractmethod
    def do_commit(self, epoch: int, records: Mapping[str, bytes | None]) -> None: ...

    @abc.abstractmethod
    def do_newest_epoch(self) -> int: ...

    @abc.abstractmethod
    def do_claim_epoch(self) -> int: ...
