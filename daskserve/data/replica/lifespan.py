"""The lifespan protocol of ASGI applications: their start-up and shutdown.

asgi-lifespan 2.1 (2023, its latest release) does not replace this. Tried with four applications, it waits for
its timeout (5 s) if one answers ``startup.failed``, whose message it drops, or returns without an answer; it
raises for one that has no lifespan; and its scope lacks ``asgi``, which the specification requires.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from daskserve.errors import ServeError
from daskserve.types import Message

logger = logging.getLogger("daskserve.replica")


class Lifespan:
    """The start-up and shutdown of an ASGI application, on the user's loop; no-ops if it has none."""

    def __init__(self) -> None:
        #: The application's state; requests get a copy as ``scope["state"]``.
        self.state: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._from_app: asyncio.Queue[Message] = asyncio.Queue()

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._task.done()

    async def open(self, app: Callable[..., Awaitable[None]]) -> None:
        """Return when the application is ready; raise `ServeError` if it reports a failure.

        An application that raises does not support the protocol, and is served without it.
        """
        self._task = asyncio.create_task(self._run(app))
        answer = await self._ask("lifespan.startup")
        if answer["type"] == "lifespan.startup.failed":
            raise ServeError(f"The ASGI application's start-up failed: {answer.get('message', '')}")

    async def close(self) -> None:
        """Run the application's shutdown."""
        if self.is_open:
            await self._ask("lifespan.shutdown")

    async def _ask(self, kind: str) -> Message:
        self._to_app.put_nowait({"type": kind})
        return await self._from_app.get()

    async def _run(self, app: Callable[..., Awaitable[None]]) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        try:
            await app(scope, self._to_app.get, self._from_app.put)
        except Exception as error:
            logger.debug("The ASGI application does not support the lifespan protocol: %r", error)
        finally:
            self._from_app.put_nowait({"type": "lifespan.gone"})
