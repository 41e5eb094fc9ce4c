"""Deadlines: the time by which a request must have been answered.

Whoever accepts a request sets its deadline, once, on the clock of its event loop; it goes with the request's
envelope. Between processes travels what is left of it, because their clocks differ. Each process through
which a request passes holds the deadline by itself: a caller that hangs, or whose cancellation is late, must
not keep a replica busy. What a request calls in turn has no more time than is left to the request itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from daskserve.errors import RequestTimeoutError

T = TypeVar("T")


async def until(deadline: float, work: Coroutine[Any, Any, T], message: str) -> T:
    """Return what the work comes to, or cancel it at the deadline; it is not begun after that.

    Deadlines may be nested, and of equal ones the outermost raises.

    Raises
    ------
    RequestTimeoutError
        The deadline has passed; with ``message``.
    """
    if asyncio.get_running_loop().time() >= deadline:
        work.close()
        raise RequestTimeoutError(message)
    # Not `Clock.wait_for`: a TimeoutError of user code must not pass for our deadline.
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise RequestTimeoutError(message) from error


def earliest(*deadlines: float | None) -> float | None:
    """Return the first of some deadlines; None stands for having none."""
    return min((each for each in deadlines if each is not None), default=None)


def is_over(deadline: float | None, now: float) -> bool:
    """Whether a deadline, if there is one, has passed."""
    return deadline is not None and now >= deadline
