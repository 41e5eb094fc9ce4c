"""Shadows: copies of requests whose responses are discarded.

A shadow must never affect the caller of the original. It gets each message that the original reads, and the
original never waits for it. A shadow that falls too far behind is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from daskserve.common.types import BackendTag, Envelope, Message, Receive, Send
from daskserve.loops.deadlines import until
from daskserve.loops.tasks import TaskSet
from daskserve.payload.pickling import message_bytes

logger = logging.getLogger("daskserve.router")

#: Maximum number of bytes that a shadow may be behind its original.
MAX_BEHIND_BYTES = 1024 * 1024
#: Maximum size of the larger bodies, gathered before they are sent, that all shadows of a process hold.
MAX_WHOLE_BYTES = 64 * 1024 * 1024

SendTo = Callable[[Envelope, Receive, Send], Coroutine[Any, Any, None]]


class ShadowBudget:
    """The bytes of large bodies that the shadows of one process may still hold."""

    def __init__(self, left_bytes: int = MAX_WHOLE_BYTES) -> None:
        self.left_bytes = left_bytes


class Shadow:
    """One copy of a request, sent to a backend.

    Parameters
    ----------
    send_to : callable
        Sends the copy to a replica of the backend.
    tasks : TaskSet
        The set that owns the task of the copy.
    room : ShadowBudget, optional
        Shared by all shadows of the process; without it, larger bodies cancel the copy.
    """

    def __init__(
        self,
        backend: BackendTag,
        envelope: Envelope,
        send_to: SendTo,
        tasks: TaskSet,
        room: ShadowBudget | None = None,
    ) -> None:
        self._room = room or ShadowBudget(0)
        self._whole_bytes = 0
        self._backend = backend
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._behind_bytes = 0
        self._kind = "websocket" if envelope.head.get("type") == "websocket" else "http"
        self.task = tasks.spawn(self._run(envelope, send_to), f"shadow-{backend}")
        self.task.add_done_callback(self._give_back)

    def put(self, message: Message) -> None:
        """Give the copy a message that the original has read."""
        if self.task.done():
            return
        self._behind_bytes += message_bytes(message)
        if self._behind_bytes > MAX_BEHIND_BYTES and not self._has_room(message):
            logger.debug("Cancelled a shadow request to %s that was too slow", self._backend)
            self.task.cancel()
            return
        self._messages.put_nowait(message)

    def _has_room(self, message: Message) -> bool:
        if self._whole_bytes:
            return True  # what follows such a message is small
        size_bytes, room = message_bytes(message), self._room
        is_whole = self._behind_bytes == size_bytes and not message.get("more_body", False)
        if not is_whole or size_bytes > room.left_bytes:
            return False
        room.left_bytes -= size_bytes
        self._whole_bytes = size_bytes
        return True

    def _give_back(self, _: asyncio.Task[None]) -> None:
        self._room.left_bytes += self._whole_bytes
        self._whole_bytes = 0

    def end(self) -> None:
        """End the copy, because the original has ended; the original may not have read all of its body."""
        self.put({"type": f"{self._kind}.disconnect"})

    async def _receive(self) -> Message:
        message = await self._messages.get()
        self._behind_bytes -= message_bytes(message)
        return message

    async def _run(self, envelope: Envelope, send_to: SendTo) -> None:
        try:
            sending = send_to(envelope, self._receive, _drop)
            if envelope.deadline is not None:
                sending = until(envelope.deadline, sending, "The deadline of the request has passed.")
            await sending
        except Exception as error:
            # A shadow must never affect the caller.
            logger.debug("A shadow request to %s failed: %r", self._backend, error)


async def _drop(message: Message) -> None:
    pass
