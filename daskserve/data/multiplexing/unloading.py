"""Unloading a model: its hook runs exactly once, even if other code still refers to the model."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
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
    running = asyncio.ensure_future(_end(model, hook))
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


async def _end(model: Any, hook: Callable[[Any], Any] | None) -> None:
    function = _bound(model) if hook is None else partial(hook, model)
    if function is None:
        return
    if inspect.iscoroutinefunction(function if hook is None else hook):
        await function()
    else:
        await _in_thread(function)


def _bound(model: Any) -> Callable[[], Any] | None:
    if isinstance(model, type):
        return None
    # Python finds special methods in the class only: an object with `__getattr__` may answer to any name.
    names = ["__del__"] if hasattr(type(model), "__del__") else ["aclose", "close"]
    return next((each for name in names if callable(each := getattr(model, name, None))), None)


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
