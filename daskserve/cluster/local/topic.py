"""The topic of a local cluster, which can lose, delay and reorder messages."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import msgpack

from daskserve.cluster.protocols.base import TopicHandler


def plain_copy(value: Any) -> Any:
    """Return plain values as a channel or topic delivers them; raise `TypeError` for other values."""
    return msgpack.unpackb(msgpack.packb(value), use_list=False, strict_map_key=False)


#: Returns the delays, in seconds, after which a message reaches one listener: none if the message is lost,
#: several if it is duplicated.
Deliver = Callable[[Any], Iterable[float]]


def deliver_at_once(message: Any) -> Iterable[float]:
    """Deliver every message once, in order, in the loop's next iteration."""
    return (0.0,)


class LocalTopic:
    """Publish and subscribe. Messages that are due at the same time arrive in the order of publication.

    Attributes
    ----------
    deliver : callable
        How later messages are delivered, see `Deliver`.
    """

    def __init__(self, deliver: Deliver) -> None:
        self.deliver = deliver
        self._handlers: dict[int, TopicHandler] = {}
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, int, Any]] = []

    def subscribe(self, handler: TopicHandler) -> Callable[[], None]:
        """Call the handler for every later message; return a function that unsubscribes."""
        number = next(self._numbers)
        self._handlers[number] = handler

        def unsubscribe() -> None:
            self._handlers.pop(number, None)

        return unsubscribe

    def publish(self, message: Any) -> None:
        """Send plain values to every current listener."""
        message = plain_copy(message)
        loop = asyncio.get_running_loop()
        for number in self._handlers:
            for delay_s in self.deliver(message):
                # Timers that are due together fire in any order, so each delivers the first due message.
                heapq.heappush(self._due, (loop.time() + delay_s, next(self._numbers), number, message))
                if delay_s > 0:
                    loop.call_later(delay_s, self._deliver_next)
                else:
                    loop.call_soon(self._deliver_next)

    def _deliver_next(self) -> None:
        _, _, number, message = heapq.heappop(self._due)
        if number in self._handlers:
            self._handlers[number](plain_copy(message))
