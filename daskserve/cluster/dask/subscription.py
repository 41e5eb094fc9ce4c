"""A process's subscription to an instance's topic, through the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from distributed import Client

from daskserve.cluster.protocols.base import TopicHandler
from daskserve.common.clock import Clock

#: Timeout of the first attempt to subscribe, and the longest timeout.
MARKER_RETRY_S = 0.005
MAX_MARKER_RETRY_S = 0.5


class TopicSubscription:
    """Dask has one handler per client and topic, so a process subscribes once for all its listeners."""

    def __init__(self, client: Client, topic: str, clock: Clock) -> None:
        self._client = client
        self._topic = topic
        self._clock = clock
        self._handlers: list[TopicHandler] = []
        self._subscribing: asyncio.Future[None] | None = None

    async def subscribe(self, handler: TopicHandler) -> Callable[[], Awaitable[None]]:
        """Return a function that unsubscribes; the handler gets every message published after that."""
        self._handlers.append(handler)
        try:
            if self._subscribing is None:
                self._subscribing = asyncio.ensure_future(self._subscribe())
            await asyncio.shield(self._subscribing)
        except BaseException:
            self._handlers.remove(handler)
            if not self._handlers and self._subscribing is not None:
                self._subscribing.cancel()
                self._unsubscribe()
            raise

        async def unsubscribe() -> None:
            if handler in self._handlers:
                self._handlers.remove(handler)
            if not self._handlers:
                self._unsubscribe()

        return unsubscribe

    async def resume(self) -> None:
        """Subscribe at the scheduler that has replaced a lost one, if there are listeners."""
        # A first subscription that is still in progress retries until it succeeds.
        if self._subscribing is not None and self._subscribing.done():
            await self._subscribe()

    def end(self) -> None:
        """Unsubscribe, unless the subscription is still in progress."""
        if self._subscribing is not None and self._subscribing.done():
            self._unsubscribe()

    def _unsubscribe(self) -> None:
        if self._subscribing is not None:
            self._subscribing = None
            if self._client.status == "running":
                self._client.unsubscribe_topic(self._topic)

    async def _subscribe(self) -> None:
        marker = uuid.uuid4().hex
        seen = asyncio.Event()

        def hear(event: tuple[float, Any]) -> None:
            message = event[1]
            if message.get("kind") == "marker":
                if message["id"] == marker:
                    seen.set()
                return
            for each in list(self._handlers):
                each(message)

        # Dask does not acknowledge subscriptions. A subscription is active once its own marker event arrives.
        patience_s = MARKER_RETRY_S
        while not seen.is_set():
            self._client.subscribe_topic(self._topic, hear)
            await self._client.log_event(self._topic, {"kind": "marker", "id": marker})
            with contextlib.suppress(TimeoutError):
                await self._clock.wait_for(seen.wait(), patience_s)
            patience_s = min(MAX_MARKER_RETRY_S, patience_s * 2)
