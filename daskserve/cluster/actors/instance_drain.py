"""Draining of an instance before its end, for the supervisor and for local clusters."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from daskserve.cluster.protocols.base import STOP_MARGIN_S
from daskserve.common.clock import Clock
from daskserve.errors import ServeError

logger = logging.getLogger("daskserve.supervisor")

#: Timeout of the controller's first answer.
ANSWER_S = 5.0


async def drain(instance: str, call: Callable[[str], Awaitable[Any]], clock: Clock) -> None:
    """Return once an instance has no requests in flight, or once their time limit has passed.

    Parameters
    ----------
    call : callable
        Calls a verb of the instance's controller.
    """
    try:
        limit_s = await clock.wait_for(call("drain"), ANSWER_S)
        if limit_s:
            logger.info("Instance %s drains for up to %s s before it ends", instance, limit_s)
            await clock.wait_for(call("wait_until_drained"), limit_s + STOP_MARGIN_S)
    except (OSError, TimeoutError, ServeError) as error:
        logger.warning("Instance %s ends although it could not be drained: %r", instance, error)
