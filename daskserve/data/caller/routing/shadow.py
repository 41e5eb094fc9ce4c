"""Shadows: copies of requests whose responses are discarded, or compared with those of the originals.

A shadow must never affect the caller of the original. It gets each message that the original reads, and the
original never waits for it. A shadow that falls too far behind is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from daskserve.common.formatting import shown
from daskserve.common.types import BackendTag, Envelope, Message, Receive, Send
from daskserve.loops.deadlines import until
from daskserve.loops.tasks import TaskSet
from daskserve.payload.error_text import summary_of
from daskserve.payload.importing import import_definition
from daskserve.payload.pickling import message_bytes

logger = logging.getLogger("daskserve.router")

#: Maximum number of bytes that a shadow may be behind its original.
MAX_BEHIND_BYTES = 1024 * 1024
#: Maximum total size of larger bodies that the shadows of a process hold.
MAX_WHOLE_BYTES = 64 * 1024 * 1024

#: Maximum size of each of two answers that are compared.
MAX_COMPARED_BYTES = 1024 * 1024
#: Maximum number of pending comparisons of one rollout and process.
MAX_PENDING = 16
#: How long the function that compares two answers may take.
SLOW_S = 10.0
#: Number of kept differences, maximum length of a difference, and maximum length of an answer in it.
KEPT_DIFFERENCES = 10
MAX_SAMPLE, MAX_SHOWN = 300, 100

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
    room : ShadowBudget
        Shared by all shadows of the process.
    answer : ShadowResponse, optional
        Keeps the answer to the copy.
    """

    def __init__(
        self,
        backend: BackendTag,
        envelope: Envelope,
        send_to: SendTo,
        tasks: TaskSet,
        room: ShadowBudget,
        answer: ShadowResponse | None = None,
    ) -> None:
        self._answer = answer
        self._room = room
        self._whole_bytes = 0
        self._backend = backend
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._behind_bytes = 0
        self._kind = "websocket" if envelope.head.get("type") == "websocket" else "http"
        #: The set that owns the copy's task, and the tasks that follow it.
        self.tasks = tasks
        self.task = tasks.spawn(self._run(envelope, send_to), f"shadow-{backend}")
        self.task.add_done_callback(self._give_back)

    def put(self, message: Message) -> None:
        """Pass the copy a message that the original has read."""
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
            return True  # messages after a whole body are small
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
            sending = send_to(envelope, self._receive, _drop if self._answer is None else self._answer.send)
            if envelope.deadline is not None:
                sending = until(envelope.deadline, sending, "The deadline of the request has passed.")
            await sending
        except Exception as error:
            # Any error is ignored, because a shadow must never affect the caller.
            if self._answer is not None:
                self._answer.error = error
            logger.debug("A shadow request to %s failed: %r", self._backend, error)


async def _drop(message: Message) -> None:
    pass


async def send_with_copies(
    copies: Sequence[Shadow], send_to: SendTo, envelope: Envelope, receive: Receive, send: Send
) -> None:
    """Send a request, and pass the messages that it reads to its copies."""
    if not envelope.has_body:
        for copy in copies:
            copy.put({"type": "http.request", "body": b"", "more_body": False})

    async def receive_and_copy() -> Message:
        message = await receive()
        if envelope.has_body:
            for copy in copies:
                copy.put(message)
        return message

    try:
        await send_to(envelope, receive_and_copy, send)
    except asyncio.CancelledError:
        # Ended here, because the copy of an endless stream would never end.
        for copy in copies:
            copy.task.cancel()
        raise
    finally:
        for copy in copies:
            copy.end()


class ShadowResponse:
    """The answer to a request, up to `MAX_COMPARED_BYTES`; see `HTTPShadowResponse` for HTTP."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._messages: list[Message] = []
        self._bytes = 0

    @property
    def is_whole(self) -> bool:
        """Whether the whole answer is kept."""
        return self._bytes <= MAX_COMPARED_BYTES

    def note(self, message: Message) -> None:
        """Keep a message, unless the answer has become too large."""
        self._bytes += message_bytes(message)
        if self.is_whole:
            self._messages.append(message)

    async def send(self, message: Message) -> None:
        """Keep a message, in place of the caller's ``send``."""
        self.note(message)

    def value(self) -> Any:
        """Return the response, the value of a call, or the values of a stream; raise the error if it failed.

        Calls user code to unpickle.
        """
        if self.error is not None:
            raise self.error
        start = next((each for each in self._messages if "status" in each), None)
        if start is not None:
            bodies = (each.get("body", b"") for each in self._messages)
            return HTTPShadowResponse(start["status"], tuple(map(tuple, start["headers"])), b"".join(bodies))
        values = [each["payload"].load() for each in self._messages if "payload" in each]
        return values[0] if len(values) == 1 else values


@dataclass(frozen=True, slots=True)
class HTTPShadowResponse:
    """An HTTP response, for a function that compares two of them."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class ResponseComparer:
    """Compares the answers of shadowed requests in a thread, one after another.

    Parameters
    ----------
    path : str or None
        Import path of the function that returns whether two answers are equal.
    slow_s : float
        A comparison that takes longer counts as failed. No other comparison starts until it returns.
    """

    def __init__(self, path: str | None, slow_s: float = SLOW_S) -> None:
        self.path = path
        self._slow_s = slow_s
        #: `failed` counts answers that the function could not compare; `trouble` is the last error.
        self.compared = self.different = self.failed = 0
        self.trouble = ""
        #: The last differences, as strings.
        self.samples: deque[str] = deque(maxlen=KEPT_DIFFERENCES)
        self._pending = 0
        self._turn = asyncio.Lock()

    @property
    def has_room(self) -> bool:
        """Whether another comparison may begin; otherwise the request is not copied."""
        return self._pending < MAX_PENDING

    def begin(self) -> None:
        """Count a request that is copied; `compare` or `skip` follows."""
        self._pending += 1

    def skip(self) -> None:
        """Record that a copied request is not compared."""
        self._pending -= 1

    async def compare(
        self, name: str, old: ShadowResponse, new: ShadowResponse, copy: asyncio.Task[None]
    ) -> None:
        """Compare two answers once the copy is answered."""
        try:
            await asyncio.wait([copy])
            if copy.cancelled() or not (old.is_whole and new.is_whole):
                return
            async with self._turn:
                comparing = asyncio.ensure_future(asyncio.to_thread(self._difference, old, new))
                if not (await asyncio.wait([comparing], timeout=self._slow_s))[0]:
                    self._fail(
                        f"{self.path or 'the comparison'} has not returned for {shown(self._slow_s)} s"
                    )
                    await asyncio.wait([comparing])
                    return
                difference, trouble = comparing.result()
            if trouble:
                self._fail(trouble)
                return
            self.compared += 1
            if difference:
                self.different += 1
                self.samples.append(f"{name}: {difference}"[:MAX_SAMPLE])
        finally:
            self._pending -= 1

    def _fail(self, trouble: str) -> None:
        self.failed += 1
        self.trouble = trouble[:MAX_SAMPLE]

    def _difference(self, old: ShadowResponse, new: ShadowResponse) -> tuple[str, str]:
        """Return the difference between two answers, and why they cannot be compared; "" for neither."""
        before, after = _shown_value(old), _shown_value(new)
        if isinstance(before, BaseException) or isinstance(after, BaseException):
            is_equal = _kind_of(before) == _kind_of(after)
        else:
            try:
                is_equal = bool(
                    _equal(before, after)
                    if self.path is None
                    else import_definition(self.path)(before, after)
                )
            except BaseException as error:
                # User code may raise anything, and this thread runs nothing else.
                return "", f"{self.path or 'the comparison'} raised {summary_of(error)}"
        return ("" if is_equal else f"{_short(before)} != {_short(after)}"), ""

    def plain(self) -> list[Any]:
        """Return the totals, the last differences and the last error as plain values."""
        return [self.compared, self.different, list(self.samples), self.failed, self.trouble]


def _shown_value(answer: ShadowResponse) -> Any:
    try:
        return answer.value()
    except BaseException as error:  # raised by user code or unpickling; this thread runs nothing else
        return error


def _kind_of(value: Any) -> str:
    """Return the class of an error, which may be packed; empty for anything else."""
    return summary_of(value).partition(":")[0] if isinstance(value, BaseException) else ""


def _equal(before: Any, after: Any) -> Any:
    if isinstance(before, HTTPShadowResponse) and isinstance(after, HTTPShadowResponse):
        return (before.status, before.body) == (after.status, after.body)
    return before == after


def _short(value: Any) -> str:
    if isinstance(value, BaseException):
        return summary_of(value)[:MAX_SHOWN]
    if isinstance(value, HTTPShadowResponse):
        return f"{value.status} {value.body[:MAX_SHOWN]!r}"
    try:
        return repr(value)[:MAX_SHOWN]
    except Exception:  # raised by user code; the difference counts even if it cannot be shown
        return f"<{type(value).__name__}>"
