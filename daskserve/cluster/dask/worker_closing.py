"""Decides what a worker does when Dask closes it.

- Its stream from the scheduler breaks: it may continue to serve; see `daskserve.cluster.worker.reconnect`.
- The scheduler has retired it, for example at the end of its lifetime: the requests in flight complete first.
  Usually there are none, because the actors have moved before. But a scheduler that has just started does not
  know the instances yet, and retires a worker at once.

In all other cases, it closes as without daskserve.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Awaitable, Callable

from distributed import Worker

from daskserve.cluster.distributed_internals import (
    IS_REMOVED,
    IS_UNKNOWN,
    RETIRES_ITSELF,
    STREAM_BROKE,
    is_present,
    is_retiring,
    pause_heartbeat,
)

#: Why a worker closes that its scheduler has retired: any of these may come first.
_RETIRED = (IS_REMOVED, IS_UNKNOWN, STREAM_BROKE, *RETIRES_ITSELF)


class WorkerOutcome(enum.Enum):
    """The action of a worker that has lost its scheduler."""

    #: The worker registers again.
    STAYS = enum.auto()
    #: The worker closes, and its nanny, if it has one, starts a new one.
    RESTARTS = enum.auto()
    #: The worker and its nanny close, as without daskserve.
    CLOSES = enum.auto()


def answer_close(
    worker: Worker, survive: Callable[[], Awaitable[WorkerOutcome]], complete: Callable[[], Awaitable[None]]
) -> None:
    """Decide from now on what a worker does when Dask closes it; see the module.

    Parameters
    ----------
    survive
        Called when the stream from the scheduler breaks, unless the worker is being retired.
    complete
        Completes the requests in flight, within a time limit; called when the scheduler has retired the
        worker.
    """
    original = worker.close
    is_surviving = is_completing = False
    closes_nanny: bool | None = None  # what a worker wants that has retired itself

    async def close(
        timeout: float = 30, executor_wait: bool = True, nanny: bool = True, reason: str = "worker-close"
    ) -> str | None:
        nonlocal is_surviving, is_completing, closes_nanny
        if reason in RETIRES_ITSELF:
            closes_nanny = nanny
        if is_surviving and reason == IS_UNKNOWN:
            return None  # a heartbeat from before the loss has reached the next scheduler
        if is_completing and reason in _RETIRED:
            return None  # the worker closes soon
        is_lost = reason == STREAM_BROKE and is_present(worker) and sys.exception() is None
        if is_lost and not is_surviving:
            is_surviving = True
            try:
                outcome = await survive()
            except Exception:
                await original(timeout, executor_wait, False, reason)
                raise
            finally:
                is_surviving = False
            if outcome is WorkerOutcome.STAYS:
                return None
            if outcome is WorkerOutcome.RESTARTS:
                executor_wait = nanny = False  # code in its threads may run for a long time
        elif reason in _RETIRED and is_retiring(worker):
            is_completing = True
            pause_heartbeat(worker)
            try:
                await complete()
            finally:
                is_completing = False
            nanny = nanny if closes_nanny is None else closes_nanny
        return await original(timeout, executor_wait, nanny, reason)

    worker.close = close  # type: ignore[method-assign]
    worker.stream_handlers["close"] = close


def stop_answering_close(worker: Worker) -> None:
    """Undo `answer_close`; idempotent."""
    if vars(worker).pop("close", None) is not None:
        worker.stream_handlers["close"] = worker.close
