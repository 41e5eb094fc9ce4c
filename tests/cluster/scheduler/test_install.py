"""Starting an instance: a cancelled start must not start it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from daskserve.cluster.scheduler.install import start_instance


class SwallowsCancellation:
    """A connection whose calls to the scheduler swallow a cancellation, as ``asyncio.wait_for`` may."""

    def __init__(self) -> None:
        self.client: Any = self
        self.is_asked = False

    async def check_scheduler(self, timeout_s: float) -> bool:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return True

    async def ask(self, verb: str, **message: Any) -> None:
        self.is_asked = True


async def test_a_swallowed_cancellation_does_not_start_an_instance() -> None:
    connection: Any = SwallowsCancellation()
    starting = asyncio.create_task(start_instance(connection, "local", timeout_s=1.0))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not connection.is_asked
