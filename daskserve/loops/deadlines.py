"""Deadlines: the time by which a request must be answered.

The process that accepts a request sets its deadline once, on the clock of its event loop. The deadline is
part of the request's envelope. Between processes, the remaining time is sent instead, because their clocks
differ. Every process on the path enforces the deadline, so that a caller that hangs, or whose cancellation is
late, does not keep a replica busy. Nested calls of a request do not get more time than the request itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from daskserve.errors import RequestTimeoutError

T = TypeVar("T")


async def until(deadline: float, work: Coroutine[Any, Any, T], message: str) -> T:
    """Return the result of the work, or cancel it at the deadline; do not start it after the deadline.

    Deadlines may be nested; of equal deadlines, the outermost raises.

    Raises
    ------
    RequestTimeoutError
        The deadline passed; its text is ``message``.
    """
    if asyncio.get_running_loop().time() >= deadline:
        work.close()
        raise RequestTimeoutError(message)
    # Not `Clock.wait_for`: a TimeoutError of user code must not be mistaken for this deadline.
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise RequestTimeoutError(message) from error


def earliest(*deadlines: float | None) -> float | None:
    """Return the earliest deadline; None means no deadline."""
    return min((each for each in deadlines if each is not None), default=None)


def is_over(deadline: float | None, now: float) -> bool:
    """Return whether a deadline has passed; None never passes."""
    return deadline is not None and now >= deadline
