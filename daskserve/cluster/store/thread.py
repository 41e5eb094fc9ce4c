"""Stores that run blocking code in a separate thread.

Stores run in the scheduler process, whose event loop must never wait for a disk or a network. Each store has
one thread instead of a pool, which keeps the order: commits run in the order of their calls, and only this
thread uses the connection. It is a daemon thread: a hanging file system must not keep the scheduler from
exiting, and a write in progress was not yet acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from daskserve.cluster.protocols.stores import Claim, StoreChange
from daskserve.cluster.store.errors import without_password
from daskserve.cluster.store.problems import StoreProblems
from daskserve.common.types import InstanceName
from daskserve.errors import ClosedError

logger = logging.getLogger("daskserve.store")

T = TypeVar("T")
P = ParamSpec("P")

#: How long `BlockingCalls.stop` waits for running work.
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
                    # The top level of the thread: every error is passed to the caller that waits for the job.
                    future.set_exception(error)
            del item, future, job  # an idle thread must not keep a change in memory


class BlockingCalls:
    """The blocking calls of one store: they run in one thread, which starts and stops with the store."""

    def __init__(self, url: str, instance: InstanceName) -> None:
        self._url = without_password(url)
        self._instance = instance
        self._thread: StoreThread | None = None

    @property
    def is_open(self) -> bool:
        """Whether new calls are accepted; if not, earlier calls may still run."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread."""
        self._thread = StoreThread(f"daskserve-store-{self._instance}")

    async def stop(self, last: Callable[[], None]) -> None:
        """Accept no new calls, run ``last`` after all earlier ones, and end the thread.

        A thread that hangs is abandoned after `CLOSE_GRACE_S`. Does nothing if the thread is not started.
        """
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        is_idle = False
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                await asyncio.get_running_loop().run_in_executor(thread, last)
            is_idle = True
        except TimeoutError:
            logger.warning(
                "Store %s did not close within %s s; its thread was abandoned", self._url, CLOSE_GRACE_S
            )
        finally:
            # Joining an idle thread takes microseconds; a hanging thread is not joined.
            thread.shutdown(wait=is_idle)

    async def run(self, job: Callable[..., T], *args: Any) -> T:
        """Run a job after all earlier ones and return its result.

        Raises
        ------
        ClosedError
            The store is not open.
        """
        if self._thread is None:
            raise ClosedError(f"The store {self._url} of instance {self._instance!r} is not open.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, job, *args)

    def post(self, job: Callable[[], None]) -> None:
        """Queue a job after all jobs submitted so far. Call this in the store's thread."""
        thread = self._thread
        if thread is not None:
            thread.submit(job).add_done_callback(self._log_failure)

    def _log_failure(self, ended: Future[None]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            logger.error("Background work of store %s failed", self._url, exc_info=error)


class BlockingStore(Protocol):
    """The blocking half of a store. Its methods run only in the store's thread, one at a time.

    Attributes
    ----------
    url : str
        The store's URL with its password masked.
    problems : StoreProblems
        The records that could not be read.
    """

    url: str
    instance: InstanceName
    problems: StoreProblems

    def open(self) -> None:
        """Connect to the place that keeps the records, and prepare it."""

    def close(self) -> None:
        """Release the resources that `open` acquired, even if it failed."""

    def load(self) -> Mapping[str, bytes]:
        """Return all records."""

    def commit(
        self, epoch: int, records: Mapping[str, bytes | None], must_last: bool, may_wait: bool
    ) -> None:
        """Write one transaction, whole or not at all; raises the errors of `Store.commit`."""

    def rewrite(self, epoch: int, records: Mapping[str, bytes]) -> None:
        """Replace all records at the place that the URL names now; raise an error if ``epoch`` is not the
        newest."""

    def newest_epoch(self) -> int:
        """Return the newest epoch; 0 if there is none."""

    def claim_epoch(self, after: int | None = None, owner: str = "") -> int:
        """Claim the next epoch, durably, and return it; commits with older ones fail from now on.

        Parameters
        ----------
        after
            Claim only the epoch after this one. None: claim the next epoch without this condition.
        owner
            The instance that claims it, as a part of a file name; empty for none.

        Raises
        ------
        StaleEpochError
            ``after`` is not the newest epoch. If two processes claim after the same epoch, one of them fails.
        """

    def newest_claim(self, *, answers: bool = False) -> Claim:
        """Return the newest claim; with ``answers``, answer all queries, because the owner is alive."""

    def query_owner(self, by: str) -> bool:
        """Query whether the owner is alive, unless a query is pending; return whether it has answered."""

    def forget_query(self, by: str) -> None:
        """Remove a query and its answer."""


class ThreadedStore:
    """A store in a file or folder, which several clusters may use at once: a `BlockingStore` in a thread.

    A store that is not open raises `ClosedError`.
    """

    def __init__(self, blocking: BlockingStore, calls: BlockingCalls) -> None:
        self.blocking = blocking
        self.calls = calls

    def __repr__(self) -> str:
        state = "open" if self.calls.is_open else "closed"
        kind, problems = type(self.blocking).__name__, len(self.blocking.problems.found)
        return f"<{kind} {self.blocking.url} {self.blocking.instance} {state} problems={problems}>"

    async def open(self) -> None:
        if self.calls.is_open:
            return
        self.calls.start()
        try:
            await self.calls.run(self.blocking.open)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self.calls.stop(self.blocking.close)

    async def load(self) -> Mapping[str, bytes]:
        return await self.calls.run(self.blocking.load)

    async def commit(self, epoch: int, change: StoreChange) -> None:
        await self.calls.run(
            self.blocking.commit, epoch, dict(change.records), change.must_last, change.may_wait
        )

    async def rewrite(self, epoch: int, change: StoreChange, unreadable: Sequence[str] = ()) -> None:
        known = await self.load() if unreadable else {}
        kept = {key: known[key] for key in unreadable if key in known}
        written = {key: value for key, value in change.records.items() if value is not None}
        await self.calls.run(self.blocking.rewrite, epoch, {**kept, **written})

    async def newest_epoch(self) -> int:
        return await self.calls.run(self.blocking.newest_epoch)

    async def claim_epoch(self, after: int | None = None, owner: str = "") -> int:
        return await self.calls.run(self.blocking.claim_epoch, after, owner)

    async def newest_claim(self, *, answers: bool = False) -> Claim:
        return await self.calls.run(partial(self.blocking.newest_claim, answers=answers))

    async def query_owner(self, by: str) -> bool:
        return await self.calls.run(self.blocking.query_owner, by)

    async def forget_query(self, by: str) -> None:
        await self.calls.run(self.blocking.forget_query, by)

    def problems(self) -> Mapping[str, str]:
        return self.blocking.problems.all()
