"""Unloading a model: its own hook runs once, whatever it does, and whatever holds the model afterwards."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from daskserve.common.formatting import shown
from daskserve.loops.threads import start_daemon

logger = logging.getLogger("daskserve.replica")

#: How long a model's hook may take before its room is given to the next model.
UNLOAD_TIMEOUT_S = 30.0


async def unload(model: Any, hook: Callable[[Any], Any] | None, *, name: str) -> None:
    """Call what unloads a model: ``hook``, or its ``__del__``, ``aclose`` or ``close``.

    An async one is awaited, and a plain one runs in a thread of its own. Its errors are logged, and so is
    that it takes too long.
    """
    function = _bound(model) if hook is None else lambda: hook(model)
    if function is None:
        return
    is_async = inspect.iscoroutinefunction(hook if hook is not None else function)
    running = asyncio.ensure_future(function() if is_async else _in_thread(function))
    try:
        await asyncio.wait([running], timeout=UNLOAD_TIMEOUT_S)
    except asyncio.CancelledError:
        running.cancel()
        raise
    if not running.done():
        running.cancel()
        logger.warning(
            "Unloading %s takes more than %s s; its room is used again", name, shown(UNLOAD_TIMEOUT_S)
        )
    elif not running.cancelled() and (error := running.exception()) is not None:
        logger.error("Unloading %s failed", name, exc_info=error)
    _disarm(model)


def _bound(model: Any) -> Callable[[], Any] | None:
    for name in ("__del__", "aclose", "close"):
        if callable(found := getattr(model, name, None)) and not isinstance(model, type):
            return found  # type: ignore[no-any-return]
    return None


async def _in_thread(function: Callable[[], Any]) -> None:
    """Run a plain function in a daemon thread, which may hang without blocking anything else."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    context = copy_context()

    def run() -> None:
        error: BaseException | None = None
        try:
            result = context.run(function)
            if inspect.iscoroutine(result):
                result.close()
                error = TypeError("What unloads the model returned a coroutine; make it an `async def`.")
        except BaseException as raised:  # SystemExit, too, ends no more than this
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, error)

    def end(error: BaseException | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    start_daemon("daskserve-unload", run)
    await ended


def _disarm(model: Any) -> None:
    """Keep Python from calling ``__del__`` a second time, when the object is freed."""
    kind: Any = type(model)
    if hasattr(kind, "__del__"):
        names = {"__slots__": (), "__del__": lambda self: None, "__module__": kind.__module__}
        with suppress(Exception):  # an object of a C extension keeps its class
            model.__class__ = type(kind)(kind.__name__, (kind,), names)
