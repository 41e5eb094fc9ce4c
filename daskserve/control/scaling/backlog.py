"""Polls the length of a broker's queue for the policy ``queue``. The module `brokers` connects to brokers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from daskserve.common.clock import Clock
from daskserve.common.formatting import shown
from daskserve.options.fields.secrets import masked
from daskserve.options.queues import QueueOptions

logger = logging.getLogger("daskserve.autoscaling")

#: Timeout of one poll; the next poll tries again.
REPLY_TIMEOUT_S = 5.0


class QueueLength(Protocol):
    """One queue at its broker."""

    async def read(self) -> float:
        """Return how many tasks wait; raise an `OSError` or `ValueError` if the length is unavailable."""
        ...

    async def close(self) -> None:
        """Close the connection; the next `read` reconnects."""
        ...


class Backlog:
    """Polls the length of a queue in a background task.

    Parameters
    ----------
    owner : str
        The deployment that is scaled, for the log.
    open_queue : callable
        Returns the queue at its broker. It is called within the task.
    variables : mapping
        This process's environment variables, to which the options may refer.
    """

    def __init__(
        self,
        owner: str,
        options: QueueOptions,
        *,
        open_queue: Callable[[QueueOptions], QueueLength],
        clock: Clock,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.options = options
        self._owner = owner
        self._open_queue = open_queue
        self._clock = clock
        self._variables = variables
        #: The queue that was opened last, and the options that it was opened with.
        self._opened: tuple[QueueLength, QueueOptions] | None = None
        self._value: tuple[float, float] | None = None
        #: Errors that were already logged.
        self._logged: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        #: A human-readable description of the last poll's error; empty if it succeeded.
        self.problem = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.options.queue_name!r}: {self.value()}>"

    def start(self) -> None:
        """Start polling."""
        self._task = asyncio.create_task(self.run(), name=f"daskserve-queue-{self.options.queue_name}")

    def stop(self) -> None:
        """Stop polling."""
        self._is_stopped = True  # a broker library may swallow the cancellation
        if self._task is not None:
            self._task.cancel()

    def value(self) -> float | None:
        """Return the last length; None if there is no length or it is stale."""
        if self._value is None:
            return None
        length, at = self._value
        return length if self._clock.now() - at <= self.options.max_age_s else None

    async def run(self) -> None:
        """Poll at once and then at every interval, until cancelled."""
        try:
            while not self._is_stopped:
                await self._poll()
                if not self._is_stopped:
                    await self._clock.sleep(self.options.poll_interval_s)
        finally:
            await self._close()

    async def _queue(self) -> QueueLength:
        """Return the queue at its broker; reopen it if a URL that the options refer to has changed."""
        options = self.options
        if options.has_references:
            options = await asyncio.to_thread(options.resolved, self._variables)
        if self._opened is None or self._opened[1] != options:
            await self._close()
            self._opened = (self._open_queue(options), options)
        return self._opened[0]

    async def _poll(self) -> None:
        # A length's age counts from the request, not from the answer.
        at = self._clock.now()
        try:
            queue = await self._queue()
            length = await self._clock.wait_for(queue.read(), REPLY_TIMEOUT_S)
            if not 0 <= length < math.inf:
                raise ValueError(f"the broker reports a length of {length}")
        except TimeoutError:
            self._record_problem(f"the broker has not answered for {shown(REPLY_TIMEOUT_S)} s")
            await self._close()  # otherwise, a late answer would be read as the answer to the next poll
        except Exception as error:
            # An exception from a broker library must not end the polling loop.
            self._record_problem(masked(str(error)) or type(error).__name__)
            await self._close()
        else:
            if self.problem:
                logger.info("The autoscaler of %s reads queue %r again", self._owner, self.options.queue_name)
            self._value = (float(length), at)
            self.problem = ""
            self._logged.clear()

    async def _close(self) -> None:
        if self._opened is None:
            return
        try:
            await self._clock.wait_for(self._opened[0].close(), REPLY_TIMEOUT_S)
        except Exception as error:
            # Any error, as above. A connection that fails to close is dropped in any case.
            logger.info(
                "The autoscaler of %s: queue %r: %s",
                self._owner,
                self.options.queue_name,
                masked(str(error)),
            )

    def _record_problem(self, text: str) -> None:
        self.problem = f"queue {self.options.queue_name!r} cannot be read: {text}"
        if text not in self._logged:
            self._logged.add(text)
            logger.warning("The autoscaler of %s: %s", self._owner, self.problem)
