"""Base class of stores that run blocking code in a thread of their own.

Stores run in the scheduler process, whose event loop must never wait for a disk or a network. Each store has
one thread instead of a pool, which keeps the order: commits run in the order of their calls, and only this
thread uses the connection. It is a daemon thread: a hanging file system must not keep the scheduler from
exiting, and a write in progress was not yet acknowledged.
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

#: How long `ThreadedStore.close` waits for running work.
CLOSE_GRACE_S = 10.0


class StoreThread(Executor):
    """One daemon thread that runs jobs one at a time, in the order of submission."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a job after all earlier ones; return its future."""
        future: Future[T] = Future()
        self._jobs.put((future, lambda: job(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the thread after all submitted jobs."""
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
                    # The thread's top loop: every error goes to the caller that waits for the job.
                    future.set_exception(error)
            del item, future, job  # an idle thread must not keep a change alive


class ThreadedStore(abc.ABC):
    """The asynchronous half of a store; the ``do_`` methods are the blocking half.

    The ``do_`` methods run only in the store's thread, one at a time. A store that is not open raises
    `ClosedError`.

    Attributes
    ----------
    url : str
        The store's URL with its password masked.
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
            logger.warning(
                "Store %s did not close within %s s; its thread was abandoned", self.url, CLOSE_GRACE_S
            )
        finally:
            # Joining an idle thread takes microseconds; a hanging thread is not joined.
            thread.shutdown(wait=is_idle)

    # The interface of a store

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

    # For use by the blocking half

    @property
    def is_closing(self) -> bool:
        """Whether the store takes no new work and only finishes what was submitted."""
        return self._thread is None

    async def run(self, job: Callable[..., T], *args: Any) -> T:
        """Run a blocking job in the store's thread and return its result."""
        if self._thread is None:
            raise ClosedError(f"The store {self.url} of instance {self.instance!r} is not open.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, job, *args)

    def post(self, job: Callable[[], None]) -> None:
        """Queue a job behind the work submitted so far. Call this in the store's thread."""
        thread = self._thread
        if thread is not None:
            thread.submit(job).add_done_callback(self._log_failure)

    def _log_failure(self, ended: Future[None]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            logger.error("Background work of store %s failed", self.url, exc_info=error)

    def report_problems(self, problems: Mapping[str, str]) -> None:
        """Set what `problems` returns, and log the new problems."""
        for name, reason in problems.items():
            if name not in self._problems:
                logger.error("Store %s, instance %s: %s: %s", self.url, self.instance, name, reason)
        self._problems = dict(problems)

    # The blocking half

    @abc.abstractmethod
    def do_open(self) -> None: ...

    @abc.abstractmethod
    def do_close(self) -> None:
        """Release what `do_open` acquired, also after it failed."""

    @abc.abstractmethod
    def do_load(self) -> Mapping[str, bytes]: ...

    @abc.abstractmethod
    def do_commit(self, epoch: int, records: Mapping[str, bytes | None]) -> None: ...

    @abc.abstractmethod
    def do_newest_epoch(self) -> int: ...

    @abc.abstractmethod
    def do_claim_epoch(self) -> int: ...
