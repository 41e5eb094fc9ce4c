"""The kind of event loop in daskserve's threads and in the processes that it starts."""

from __future__ import annotations

import asyncio

from daskserve import settings


def uses_uvloop() -> bool:
    """Return whether daskserve uses uvloop: it is installed and not disabled."""
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
    """Return a new event loop, uvloop's if `uses_uvloop`; see `daskserve.settings.ProcessSettings`."""
    if not uses_uvloop():
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
