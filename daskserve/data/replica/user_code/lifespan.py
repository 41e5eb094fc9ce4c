"""The lifespan protocol of ASGI applications: their start-up and shutdown.

asgi-lifespan 2.1 (2023, its latest release) does not replace this module. If an application answers
``startup.failed`` or returns without an answer, it waits for its timeout (5 s), and drops the message. It
raises an error for an application without a lifespan, and its scope lacks ``asgi``, which the specification
requires.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from daskserve.common.types import Message
from daskserve.data.replica.errors.log import log_error
from daskserve.errors import ServeError
from daskserve.payload.packed_errors import pack_all

logger = logging.getLogger("daskserve.replica")


class Lifespan:
    """The start-up and shutdown of an ASGI application, on the user-code loop; no-ops if it has none."""

    def __init__(self) -> None:
        #: The application's state; requests get a copy as ``scope["state"]``.
        self.state: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._from_app: asyncio.Queue[Message] = asyncio.Queue()
        self._has_received = False
        self._has_reported_failure = False

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._task.done()

    async def open(self, app: Callable[..., Awaitable[None]]) -> None:
        """Return when the application is ready; raise `ServeError` if it reports a failure.

        An application that raises without an answer is served without a lifespan, as under uvicorn. If it had
        already received the start-up message, the error is logged, because it is more likely a mistake.
        """
        self._task = asyncio.create_task(self._run(app))
        answer = await self._ask("lifespan.startup")
        if answer["type"] == "lifespan.startup.failed":
            text = str(answer.get("message", "")).rstrip()
            # Starlette sends the traceback, whose last line is the error.
            error = ServeError(text.rpartition("\n")[2] or "The application reported a failure.")
            if "\n" in text:
                error.user_traceback = text
            raise error

    async def close(self) -> None:
        """Run the application's shutdown, and log its failure."""
        if self._task is None or self._task.done():
            return
        try:
            answer = await self._ask("lifespan.shutdown")
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if answer["type"] == "lifespan.shutdown.failed":
            logger.error("The ASGI application's shutdown failed: %s", answer.get("message", ""))

    async def _ask(self, kind: str) -> Message:
        """Send a message to the application, and return the answer or the end of its lifespan."""
        self._to_app.put_nowait({"type": kind})
        answer = await self._from_app.get()
        if kind == "lifespan.shutdown" and answer["type"].startswith("lifespan.startup"):
            answer = await self._from_app.get()  # skip the answer to a start-up that was cancelled
        return answer

    async def _run(self, app: Callable[..., Awaitable[None]]) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            packed = await asyncio.to_thread(pack_all, error)
            if not self._has_received:
                logger.debug("The ASGI application does not support the lifespan protocol: %r", packed)
            elif not self._has_reported_failure:  # the failure already says why
                log_error(packed, "The lifespan of the ASGI application ended with an error")
        finally:
            self._from_app.put_nowait({"type": "lifespan.gone"})

    async def _receive(self) -> Message:
        message = await self._to_app.get()
        self._has_received = True
        return message

    async def _send(self, message: Message) -> None:
        self._has_reported_failure = message["type"].endswith(".failed")
        self._from_app.put_nowait(message)
