"""Coroutines that also run without an event loop: each of their steps can block instead of suspending.

A function that exists in a blocking and an awaitable form is written once, as a coroutine with an argument
``asynchronous``. With True, it awaits its steps. With False, each step blocks the thread and the coroutine
never suspends, so `finish` runs it like a plain function, on the caller's thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result or raise its error."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError(f"Internal error: {coroutine} suspended in a blocking call.")


async def settled(value: Any) -> Any:
    """Return the value of a call to Dask, which returns an awaitable on the event loop of its object."""
    return await value if inspect.isawaitable(value) else value
