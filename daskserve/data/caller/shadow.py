"""Shadows: copies of requests whose answers nobody waits for.

Whatever becomes of a shadow, the caller must not feel it. So a shadow is fed as the original reads, and
never waited for: one that falls too far behind is dropped, and what it has not read with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from daskserve.loops.deadlines import until
from daskserve.loops.tasks import TaskSet
from daskserve.payload import message_bytes
from daskserve.types import BackendTag, Envelope, Message, Receive, Send

logger = logging.getLogger("daskserve.router")

#: A shadow may be so many bytes behind its original.
BEHIND_BYTES = 1024 * 1024

SendTo = Callable[[Envelope, Receive, Send], Coroutine[Any, Any, None]]


class Shadow:
    """One copy of a request, on its way to a backend.

    Parameters
    ----------
    send_to : callable
        Carries the copy to a replica of the backend.
    tasks : TaskSet
        Where its task belongs.
    """

    def __init__(self, backend: BackendTag, envelope: Envelope, send_to: SendTo, tasks: TaskSet) -> None:
        self._backend = backend
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._behind_bytes = 0
        self._kind = "websocket" if envelope.head.get("type") == "websocket" else "http"
        self.task = tasks.spawn(self._run(envelope, send_to), f"shadow-{backend}")

    def put(self, message: Message) -> None:
        """Give the copy what the original has read."""
        if self.task.done():
            return
        self._behind_bytes += message_bytes(message)
        if self._behind_bytes > BEHIND_BYTES:
            logger.debug("A shadow request to %s is too slow and is dropped", self._backend)
            self.task.cancel()
            return
        self._messages.put_nowait(message)

    def end(self) -> None:
        """Tell the copy that the original has ended; it may have done so without having read its body."""
        self.put({"type": f"{self._kind}.disconnect"})

    async def _receive(self) -> Message:
        message = await self._messages.get()
        self._behind_bytes -= message_bytes(message)
        return message

    async def _run(self, envelope: Envelope, send_to: SendTo) -> None:
        try:
            sending = send_to(envelope, self._receive, _drop)
            if envelope.deadline is not None:
                sending = until(envelope.deadline, sending, "The time for the request is over.")
            await sending
        except Exception as error:
            # A shadow must never be felt by the caller.
            logger.debug("A shadow request to %s failed: %r", self._backend, error)


async def _drop(message: Message) -> None:
    pass
