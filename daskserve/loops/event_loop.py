"""Which kind of event loop runs our threads and the processes that we start."""

from __future__ import annotations

import asyncio

from daskserve import settings


def uses_uvloop() -> bool:
    """Whether event loops that daskserve makes are uvloop's: it is installed, and not ruled out."""
    if not settings.process().uvloop:
        return False
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, if there is one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, of uvloop if that is installed; see `daskserve.settings.ProcessSettings`."""
    if not uses_uvloop():
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
