"""The slots of a replica, and the short queue of requests that wait for one.

Problem: each router knows only its own requests at a replica. If a refused router could only retry, it would
mostly be refused again: the router whose request has just ended is the first to learn of the free slot, and
would take it each time. Choice: if a router knows no other replica with a free slot, its request carries a
`daskserve.common.types.QueueTimeout` and waits here. A free slot goes directly to the first request of the
queue, so a later request never takes it.

A request is refused when its timeout ends, so that its router may choose another replica. If the request
returns, it states how long it has waited and keeps its position. Each router has one request at a time in the
queue, so routers take turns, regardless of the number of requests that wait in each. The router is notified
when its request gets a slot (`SLOT_TAKEN`).
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

from daskserve.common.clock import Clock, stopwatch
from daskserve.common.formatting import shown
from daskserve.common.types import SLOT_TAKEN, Envelope, Load, QueueTimeout, RankInfo, Send, short_tag
from daskserve.data.replica.requests.batch_admission import BatchAdmission
from daskserve.errors import ActorLostError, ReplicaBusyError
from daskserve.options.fields.priority import BATCH_PRIORITY
from daskserve.telemetry.replica import ReplicaMetrics

logger = logging.getLogger("daskserve.replica")

#: The maximum length of the queue is this number plus twice the number of slots.
EXTRA_WAITERS = 16


Place: TypeAlias = tuple[int, float, int, "asyncio.Future[bool]"]


class SlotQueue:
    """Requests that wait for a slot, by priority and then by their time of waiting."""

    def __init__(self) -> None:
        #: For each request: its negated priority; the time at which it would have begun to wait without
        #: interruptions; a number for ties; and a future for whether it gets a slot.
        self.places: list[Place] = []
        self._numbers = itertools.count()

    async def wait(self, queue_timeout: QueueTimeout, give_back: Callable[[], None]) -> bool:
        """Return whether the request got a slot before its timeout.

        Parameters
        ----------
        give_back : callable
            Frees the slot if the request was cancelled just when it got one.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        place = (-queue_timeout.priority, loop.time() - queue_timeout.waited_s, next(self._numbers), waiter)
        bisect.insort(self.places, place)
        timer = loop.call_later(queue_timeout.left_s, self._expire, place)
        try:
            return await waiter
        except asyncio.CancelledError:
            if place in self.places:
                self.places.remove(place)
            elif not waiter.cancelled() and waiter.exception() is None and waiter.result():
                give_back()
            raise
        finally:
            timer.cancel()

    def _expire(self, place: Place) -> None:
        if place in self.places:
            self.places.remove(place)
            if not place[-1].done():
                place[-1].set_result(False)

    def evict_below(self, priority: int) -> bool:
        """Refuse the last request if it has a lower priority; return whether there was one."""
        if not self.places or -self.places[-1][0] >= priority:
            return False
        self._expire(self.places[-1])
        return True

    def next_priority(self) -> int | None:
        """Return the priority of the first request; None if none waits."""
        while self.places and self.places[0][-1].done():
            self.places.pop(0)
        return -self.places[0][0] if self.places else None

    def pass_on(self) -> None:
        """Give a slot to the first request. Call `next_priority` first."""
        self.places.pop(0)[-1].set_result(True)

    def reject_all(self, error: Callable[[], Exception]) -> None:
        """Fail all waiting requests, each with a new error."""
        places, self.places = self.places, []
        for *_, waiter in places:
            if not waiter.done():
                waiter.set_exception(error())


class Slots:
    """The slots of one replica, and the requests that wait for one.

    Parameters
    ----------
    metrics : ReplicaMetrics
        Counts refusals.
    """

    def __init__(self, replica_tag: str, concurrency: int, metrics: ReplicaMetrics) -> None:
        self.concurrency = concurrency
        #: Number of slots that are taken.
        self.ongoing = 0
        self.is_open = False
        #: Called whenever a slot becomes free.
        self.on_free: Callable[[], None] | None = None
        #: Why the replica takes no requests while it is not open.
        self.closed_because = f"Replica {short_tag(replica_tag)!r} is not running."
        self.replica_tag = replica_tag
        #: Returns how many requests have a slot and wait for their batch.
        self.count_batched: Callable[[], int] | None = None
        #: The rank of the replica, and the number of replicas.
        self.rank_info: RankInfo = (0, 0, 0, 1)
        self._metrics = metrics
        self._waiters = SlotQueue()
        #: Created by the first request of a batch job.
        self._batch_room: BatchAdmission | None = None
        self._idle: asyncio.Event | None = None  # created by `wait_until_idle`
        #: During `quiet`: an event that is set at the end of its block.
        self._resumed: asyncio.Event | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiters.places)

    @property
    def has_room(self) -> bool:
        """Whether a request that arrives now gets a slot at once, unless it belongs to a batch job."""
        return self.ongoing < self.concurrency and self.is_open and self._resumed is None

    def load(self) -> Load:
        """Return how many requests run, and how many wait."""
        count = self.count_batched
        return Load(self.ongoing, (0 if count is None else count()) + len(self._waiters.places))

    def usage(self) -> tuple[int, int]:
        """Return the number of taken slots and of all slots; any thread may call this."""
        return self.ongoing, self.concurrency

    def not_running(self) -> ActorLostError:
        """Return the error for a request that arrives while the replica is not open."""
        return ActorLostError(self.closed_because, begun=False)

    def take_nowait(self, envelope: Envelope | None = None) -> bool:
        """Take a slot if one is free and the replica is open; return whether this succeeded.

        A request of a batch job does not take a slot that is reserved for live requests.
        """
        if not self.has_room:
            return False
        is_batch = envelope is not None and is_of_batch(envelope)
        if (is_batch or self._batch_room is not None) and not self._admits(is_batch):
            return False
        self.ongoing += 1
        return True

    def _admits(self, is_batch: bool) -> bool:
        """Return whether a request may take one of the free slots; if so, the caller takes it."""
        room = self._batch_room
        if not is_batch:
            if room is not None:
                room.note_live(self.ongoing + 1, stopwatch())
            return True
        if room is None:
            room = self._batch_room = BatchAdmission(self.concurrency)
        now = stopwatch()
        if not room.has_room(self.concurrency - self.ongoing, self.rank_info, now):
            return False
        room.began(now)
        return True

    def take_beyond(self) -> bool:
        """Take a slot even if none is free; return False if the replica is not open or is paused."""
        takes = self.is_open and self._resumed is None
        self.ongoing += takes
        return takes

    async def take(self, envelope: Envelope, send: Send) -> None:
        """Take a slot; wait for one up to the timeout of the request.

        Raises
        ------
        ReplicaBusyError
            No slot became free in time, or the queue is full.
        ActorLostError
            The replica stopped meanwhile; the request has not begun.
        """
        queue_timeout = envelope.queue_timeout
        if self._resumed is not None and "broadcast" in envelope.head:
            await self._resumed.wait()  # no other replica can take the request
            if self.take_beyond():
                return
        if not self.is_open:
            raise self.not_running()
        if queue_timeout is None or self._is_kept_free(envelope):
            raise self._refusal(envelope)
        if not self.take_nowait(envelope):
            has_room = self.waiting < 2 * self.concurrency + EXTRA_WAITERS
            has_room = has_room or self._waiters.evict_below(queue_timeout.priority)
            if not has_room or not await self._waiters.wait(queue_timeout, partial(self.free, envelope)):
                raise self._refusal(envelope)
        try:
            if not self.is_open:
                raise self.not_running()
            load = self.load()
            await send({"type": SLOT_TAKEN, "ongoing": load.ongoing, "queued": load.queued})
        except BaseException:
            self.free(envelope)
            raise

    def free(self, envelope: Envelope | None = None) -> None:
        """Free a slot, because user code has ended; the first waiting request gets it."""
        room = self._batch_room
        if room is not None and envelope is not None and is_of_batch(envelope):
            room.ended(stopwatch(), are_waiting=bool(self._waiters.places))
        self.ongoing -= 1
        if self._waiters.places:
            self._fill()
        if not self.ongoing and self._idle is not None:
            self._idle.set()
        if self.on_free is not None:
            self.on_free()

    def resize(self, concurrency: int) -> None:
        """Change the number of slots."""
        self.concurrency = concurrency
        if self._batch_room is not None:
            self._batch_room.resize(concurrency)
        self._fill()

    def _fill(self) -> None:
        """Give free slots to waiting requests."""
        waiters = self._waiters
        while waiters.places and self._resumed is None and self.ongoing < self.concurrency:
            priority = waiters.next_priority()
            if priority is None or not self._admits(priority <= BATCH_PRIORITY):
                return
            waiters.pass_on()
            self.ongoing += 1

    @asynccontextmanager
    async def quiet(self, clock: Clock, patience_s: float) -> AsyncIterator[None]:
        """Grant no slots within a block, which begins once all slots are free, or after ``patience_s``.

        Waiting requests are refused, so that their routers may choose other replicas.
        """
        self._resumed = asyncio.Event()
        self._waiters.reject_all(self._refusal)
        try:
            try:
                if self.ongoing:
                    await clock.wait_for(self.wait_until_idle(), patience_s)
            except TimeoutError:
                logger.warning(
                    "Replica %s is reconfigured while %d requests still run, after %s s",
                    short_tag(self.replica_tag),
                    self.ongoing,
                    shown(patience_s),
                )
            yield
        finally:
            self._resumed.set()
            self._resumed = None
            self._fill()

    def close(self) -> None:
        """Accept no more requests, and reject those that wait."""
        self.is_open = False
        self._waiters.reject_all(self.not_running)

    async def wait_until_idle(self) -> None:
        """Return when no slot is taken, or after `end_wait`."""
        if self.ongoing:
            if self._idle is None or self._idle.is_set():
                self._idle = asyncio.Event()
            await self._idle.wait()

    def end_wait(self) -> None:
        """Let `wait_until_idle` return, although requests still run."""
        if self._idle is not None:
            self._idle.set()

    def _is_kept_free(self, envelope: Envelope) -> bool:
        """Return whether this request belongs to a batch job and the replica is kept free of such
        requests."""
        room = self._batch_room
        return room is not None and is_of_batch(envelope) and room.is_kept_free(self.rank_info, stopwatch())

    def _refusal(self, envelope: Envelope | None = None) -> ReplicaBusyError:
        is_kept_free = envelope is not None and self._is_kept_free(envelope)
        return self._metrics.refusal(self.replica_tag, 0 if is_kept_free else self.ongoing)


def is_of_batch(envelope: Envelope) -> bool:
    """Return whether a request belongs to a batch job, which leaves a slot to live requests."""
    # the router has already read the priority, even from a header or a name
    if envelope.queue_timeout is not None:
        return envelope.queue_timeout.priority <= BATCH_PRIORITY
    facts = envelope.head.get("facts")
    priority = facts.get("priority") if facts else None
    return isinstance(priority, int) and priority <= BATCH_PRIORITY


def found_at(slots: Slots, running: Callable[[], list[str]]) -> dict[str, Any] | None:
    """Return the attributes of the span of a wait for a slot; None if a slot is free."""
    if slots.ongoing < slots.concurrency and not slots.waiting:
        return None
    return {
        "daskserve.step": "queue",
        "daskserve.queue.place": "replica",
        "daskserve.queue.waiting_before": slots.waiting,
        "daskserve.queue.ongoing": slots.ongoing,
        "daskserve.queue.running": running(),
    }
