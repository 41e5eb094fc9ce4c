"""Unloading a model: its hook runs exactly once, even if other code still refers to the model."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from daskserve.common.formatting import shown
from daskserve.loops.threads import in_daemon

logger = logging.getLogger("daskserve.replica")

#: How long a model's unload hook may take before the next model gets its place.
UNLOAD_TIMEOUT_S = 30.0


async def unload(model: Any, hook: Callable[[Any], Any] | None, *, name: str) -> None:
    """Unload a model with ``hook``, or with its ``__del__``, ``aclose`` or ``close``.

    An async function is awaited, and a plain one runs in a new thread. Errors and timeouts are logged.
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
    silence_destructor(model)


def _bound(model: Any) -> Callable[[], Any] | None:
    for name in ("__del__", "aclose", "close"):
        if callable(found := getattr(model, name, None)) and not isinstance(model, type):
            return found  # type: ignore[no-any-return]
    return None


async def _in_thread(function: Callable[[], Any]) -> None:
    context = copy_context()

    def run(_: object) -> None:
        result = context.run(function)
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError(
                "The function that unloads the model returned a coroutine; make it an `async def`."
            )

    await in_daemon("daskserve-unload", run)


def silence_destructor(made: Any) -> None:
    """Keep Python from calling ``__del__`` again when an object is freed."""
    kind: Any = type(made)
    if hasattr(kind, "__del__"):
        names = {"__slots__": (), "__del__": lambda self: None, "__module__": kind.__module__}
        with suppress(Exception):  # the class of a C extension's object cannot be changed
            object.__setattr__(made, "__class__", type(kind)(kind.__name__, (kind,), names))
