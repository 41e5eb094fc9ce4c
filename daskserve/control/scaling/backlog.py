"""The length of a broker's queue, kept fresh for the policy ``queue``. Who speaks to brokers: `brokers`."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Protocol

from daskserve.clock import Clock
from daskserve.options.credentials import masked
from daskserve.options.queues import QueueOptions

logger = logging.getLogger("daskserve.autoscaling.context")

#: A broker that has not answered by then is asked anew at the next poll.
REPLY_S = 5.0


class QueueLength(Protocol):
    """One queue at its broker."""

    async def read(self) -> float:
        """Return how many tasks wait; raise an `OSError` or `ValueError` if that cannot be told."""
        ...

    async def close(self) -> None:
        """Hang up; it is connected anew by the next `read`."""
        ...


class Backlog:
    """Asks for the length of a queue, again and again, in a task of its own.

    Parameters
    ----------
    backend : str
        For whom, in the log.
    open_queue : callable
        Returns the queue at its broker. It is called within the task.
    """

    def __init__(
        self,
        backend: str,
        options: QueueOptions,
        *,
        open_queue: Callable[[QueueOptions], QueueLength],
        clock: Clock,
    ) -> None:
        self.options = options
        self._backend = backend
        self._open_queue = open_queue
        self._clock = clock
        self._value: tuple[float, float] | None = None
        #: Kinds of trouble that are in the log already.
        self._logged: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        #: What went wrong with the newest try, for people to read; empty if nothing did.
        self.problem = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.options.queue_name!r}: {self.value()}>"

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.create_task(self.run(), name=f"daskserve-queue-{self._backend}")

    def stop(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()

    def value(self) -> float | None:
        """Return the newest length, None if there is none that is not too old."""
        if self._value is None:
            return None
        length, at = self._value
        return length if self._clock.now() - at <= self.options.max_age_s else None

    async def run(self) -> None:
        """Ask at once and then at every interval, until cancelled."""
        queue = self._open_queue(self.options)
        try:
            while True:
                await self._poll(queue)
                await self._clock.sleep(self.options.poll_interval_s)
        finally:
            await self._hang_up(queue)

    async def _poll(self, queue: QueueLength) -> None:
        # The age of a length is counted from when it was asked for, not from when the answer came.
        at = self._clock.now()
        try:
            length = await self._clock.wait_for(queue.read(), REPLY_S)
            if not 0 <= length < math.inf:
                raise ValueError(f"the broker says that {length} wait")
        except TimeoutError:
            self._note(f"the broker has not answered for {REPLY_S:g} s")
            await self._hang_up(queue)  # or its late answer would be taken for the next one
        except Exception as error:
            # The loop that keeps the length fresh: whatever a library of others raises must not end it.
            self._note(masked(str(error)) or type(error).__name__)
            await self._hang_up(queue)
        else:
            if self.problem:
                logger.info("Backend %s: queue %r answers again", self._backend, self.options.queue_name)
            self._value = (float(length), at)
            self.problem = ""
            self._logged.clear()

    async def _hang_up(self, queue: QueueLength) -> None:
        try:
            await self._clock.wait_for(queue.close(), REPLY_S)
        except Exception as error:
            # As above: a connection that cannot be closed in order is of no use either way.
            logger.info(
                "Backend %s: queue %r: %s", self._backend, self.options.queue_name, masked(str(error))
            )

    def _note(self, text: str) -> None:
        self.problem = f"queue {self.options.queue_name!r} cannot be read: {text}"
        if text not in self._logged:
            self._logged.add(text)
            logger.warning("Backend %s: %s", self._backend, self.problem)
