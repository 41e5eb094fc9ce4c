"""The start of an actor within its time limit, such as a replica's ``start_timeout_s``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from daskserve.common.clock import Clock
from daskserve.common.formatting import shown
from daskserve.errors import RequestTimeoutError

#: A remainder of a time limit below this may be a rounding error.
RESOLUTION_S = 0.001


async def started(
    start: asyncio.Task[Mapping[str, Any]],
    name: str,
    limit_s: float | None,
    clock: Clock,
    work: Callable[[float], tuple[str, float] | None],
) -> Mapping[str, Any]:
    """Wait for the start of an actor and return its facts.

    Parameters
    ----------
    limit_s : float, optional
        The time limit of each stage of the start. It is measured in the actor's worker, so a call from a new
        controller does not restart it.
    work : callable
        Returns the current stage at a time, and its seconds.

    Raises
    ------
    RequestTimeoutError
        A stage takes longer than ``limit_s``. The start continues, so the caller stops the actor.
    """
    while limit_s is not None and not start.done():
        what, for_s = work(clock.now()) or ("", 0.0)
        left_s = limit_s - for_s
        if left_s < RESOLUTION_S:
            raise RequestTimeoutError(f"{name} did not start within {shown(limit_s)} s: it was still {what}.")
        await asyncio.wait([start], timeout=left_s)
    # Shielded: a caller that gives up must not cancel the actor's start, which others may wait for.
    return await asyncio.shield(start)
