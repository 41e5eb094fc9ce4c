"""The topic of a local cluster, which loses, delays and reorders messages if told to."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import msgpack

from daskserve.cluster.base import TopicHandler


def plain_copy(value: Any) -> Any:
    """Return plain values as they come out of a channel or a topic; `TypeError` for what cannot go in."""
    return msgpack.unpackb(msgpack.packb(value), use_list=False, strict_map_key=False)


#: Says after how many seconds a message of the topic reaches one listener. No number: it is lost; several: it
#: comes that often.
Deliver = Callable[[Any], Iterable[float]]


def deliver_at_once(message: Any) -> Iterable[float]:
    """Deliver every message once, in order, as soon as the loop turns."""
    return (0.0,)


class LocalTopic:
    """Publish and subscribe. Messages due at the same time arrive in the order they were published in.

    Attributes
    ----------
    deliver : callable
        How messages published from now on are delivered, see `Deliver`.
    """

    def __init__(self, deliver: Deliver) -> None:
        self.deliver = deliver
        self._handlers: dict[int, TopicHandler] = {}
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, int, Any]] = []

    def subscribe(self, handler: TopicHandler) -> Callable[[], None]:
        """Hear every message from now on; returns what ends it."""
        number = next(self._numbers)
        self._handlers[number] = handler

        def unsubscribe() -> None:
            self._handlers.pop(number, None)

        return unsubscribe

    def publish(self, message: Any) -> None:
        """Send plain values to every listener there is now."""
        message = plain_copy(message)
        loop = asyncio.get_running_loop()
        for number in self._handlers:
            for delay_s in self.deliver(message):
                # Timers due at one time fire in no order, so each takes whatever is first by our own.
                heapq.heappush(self._due, (loop.time() + delay_s, next(self._numbers), number, message))
                if delay_s > 0:
                    loop.call_later(delay_s, self._deliver_next)
                else:
                    loop.call_soon(self._deliver_next)

    def _deliver_next(self) -> None:
        _, _, number, message = heapq.heappop(self._due)
        if number in self._handlers:
            self._handlers[number](plain_copy(message))
