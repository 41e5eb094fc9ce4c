"""The threads and event loops that user code runs on.

The pool of threads is our own: the interpreter joins threads of ``concurrent.futures`` when it exits, so one
stuck handler would keep a process alive for ever. Ours are daemons.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context

from daskserve.loops.event_loop import new_event_loop
from daskserve.loops.hops import Hop

logger = logging.getLogger("daskserve.replica")


class UserThreads:
    """Up to ``limit`` daemon threads that run plain functions; each starts when it is first needed."""

    def __init__(self, name: str, limit: int, to_worker: Hop) -> None:
        self.limit = limit
        self._name = name
        self._to_worker = to_worker
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.unfinished = 0
        self._running_threads = 0
        self._all_ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._threads)

    def put(self, job: Callable[[], None]) -> None:
        """Run a job that never raises; count `unfinished` down when it has ended."""
        self._jobs.put(job)
        self.unfinished += 1
        if self.unfinished > len(self._threads) < self.limit:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self)}", daemon=True)
            self._threads.append(thread)
            self._running_threads += 1
            thread.start()

    async def close(self, grace_s: float) -> bool:
        """Let the threads end; return whether all did. Stuck ones end when their job does."""
        for _ in self._threads:
            self._jobs.put(None)
        if self._running_threads and not await _wait_for(self._all_ended, grace_s):
            return False
        for thread in self._threads:
            thread.join()  # has done its last act, so this takes microseconds
        self._threads.clear()
        return True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # while this thread idles it must not keep a request alive
        self._to_worker.post(self._note_thread_end)

    def _note_thread_end(self) -> None:
        self._running_threads -= 1
        if not self._running_threads:
            self._all_ended.set()


class UserLoop:
    """An event loop in a daemon thread of its own."""

    def __init__(self, name: str, context: Context, to_worker: Hop) -> None:
        self.loop = new_event_loop()
        self.hop = Hop(self.loop)
        self.thread = threading.Thread(target=context.run, args=(self._main,), name=name, daemon=True)
        self._to_worker = to_worker
        self._is_closing = False
        self._grace_s = 0.0
        self._ended = asyncio.Event()

    async def close(self, grace_s: float) -> bool:
        """Cancel what runs, end the loop and its thread; return False if user code is stuck in it."""
        if not self._is_closing:
            self._grace_s = grace_s / 2
            self._is_closing = True
            self.hop.post(self.loop.stop)
        if not await _wait_for(self._ended, grace_s):
            return False
        self.thread.join()  # as in UserThreads.close
        return True

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        # User code may stop the loop, by mistake or with sys.exit() in a task; it is not theirs to end.
        while not self._is_closing:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                logger.error("User code raised %s in a background task", type(error).__name__)
        self._cancel_tasks()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        self.loop.close()
        self._to_worker.post(self._ended.set)

    def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=self._grace_s))


async def _wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()
