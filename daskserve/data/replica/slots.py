"""The slots of a replica, and the short line of requests that wait at it for one.

Problem: of the requests at a replica each router knows its own. If a router that is refused could only ask
again, it would do so in vain most of the time, and whoever holds the slot, learning first that it is free,
would have it again and again. Choice: a request for which its router knows no other replica with room comes
with `daskserve.types.Patience`, and waits here, where it is known when a slot is free. A slot goes from
hand to hand: while anybody waits it is never free, so nobody who comes later finds it so.

A request whose patience is over is refused, so that its router may choose another replica. If it comes back,
it says how long it has waited, and stands where it stood. Each router has one request at a time in the line,
so they take turns, however many more wait in each; it is told when that has its slot (`SLOT_TAKEN`).
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable

from daskserve.errors import ActorLostError, ReplicaBusyError
from daskserve.types import SLOT_TAKEN, Envelope, Load, Patience, Send

#: So many may wait in line, and twice as many as there are slots.
SPARE_PLACES = 16


class SlotLine:
    """Requests that wait for a slot, the one that has waited longest first."""

    def __init__(self) -> None:
        #: When each came, or would have without its breaks; what sets equals apart; True once it has a slot.
        self.places: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._numbers = itertools.count()

    async def wait(self, patience: Patience, give_back: Callable[[], None]) -> bool:
        """Return whether there was a slot before the patience was over.

        Parameters
        ----------
        give_back : callable
            What to do with a slot that came to a request at the moment when it was cancelled.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        place = (loop.time() - patience.waited_s, next(self._numbers), waiter)
        bisect.insort(self.places, place)
        timer = loop.call_later(patience.left_s, self._expire, place)
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

    def _expire(self, place: tuple[float, int, asyncio.Future[bool]]) -> None:
        if place in self.places:
            self.places.remove(place)
            if not place[-1].done():
                place[-1].set_result(False)

    def pass_on(self) -> bool:
        """Give a slot to the first; False if there is nobody."""
        while self.places:
            waiter = self.places.pop(0)[-1]
            if not waiter.done():
                waiter.set_result(True)
                return True
        return False

    def dissolve(self, error: Callable[[], Exception]) -> None:
        """Have all who wait raise what this returns."""
        places, self.places = self.places, []
        for *_, waiter in places:
            if not waiter.done():
                waiter.set_exception(error())


class SlotHolder:
    """The part of a replica that counts who runs and who waits."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._is_open = False
        self._ongoing = 0
        self._line = SlotLine()
        self._idle: asyncio.Event | None = None  # made for whoever waits until no request is left

    def load(self) -> Load:
        """Return how many requests run, and how many wait in any way."""
        raise NotImplementedError

    def _refusal(self) -> ReplicaBusyError:
        raise NotImplementedError

    def _not_running(self) -> ActorLostError:
        raise NotImplementedError

    async def _take_slot(self, envelope: Envelope, send: Send) -> None:
        """Take a slot for a request that has patience, or refuse it, as any other while all are taken.

        Raises
        ------
        ReplicaBusyError
            There was none in time, or the line is too long.
        ActorLostError
            The replica was stopped meanwhile; the request has not begun.
        """
        patience = envelope.patience
        if patience is None:
            raise self._refusal()
        if self._ongoing < self._concurrency:
            self._ongoing += 1
        elif len(self._line.places) >= 2 * self._concurrency + SPARE_PLACES or not await self._line.wait(
            patience, self.free_slot
        ):
            raise self._refusal()
        try:
            if not self._is_open:
                raise self._not_running()
            load = self.load()
            await send({"type": SLOT_TAKEN, "ongoing": load.ongoing, "queued": load.queued})
        except BaseException:
            self.free_slot()
            raise

    def free_slot(self) -> None:
        """Note that a request has really ended; its slot goes to the first in line."""
        if self._line.places and self._ongoing <= self._concurrency and self._line.pass_on():
            return
        self._ongoing -= 1
        if not self._ongoing and self._idle is not None:
            self._idle.set()

    def _set_concurrency(self, concurrency: int) -> None:
        self._concurrency = concurrency
        while self._ongoing < concurrency and self._line.pass_on():
            self._ongoing += 1

    def _close(self) -> None:
        """Take no requests any more, and send away who waits in line."""
        self._is_open = False
        self._line.dissolve(self._not_running)

    async def _wait_until_idle(self) -> None:
        if self._ongoing:
            if self._idle is None:
                self._idle = asyncio.Event()
            await self._idle.wait()


class Slot:
    """A request's place among those that may run at a time; free once its last holder has let go."""

    def __init__(self, free: Callable[[], None]) -> None:
        self._free = free

    _holders = 1  # for most requests that is all there ever are

    def hold(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._free()
