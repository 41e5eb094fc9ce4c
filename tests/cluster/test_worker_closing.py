"""What a worker does when Dask closes it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status

from daskserve.cluster.dask.worker_closing import WorkerOutcome, answer_close, stop_answering_close


class ClosingWorker:
    """A worker that records how it is closed."""

    def __init__(self) -> None:
        self.status = Status.running
        self.stream_handlers: dict[str, Any] = {"close": self.close}
        self.periodic_callbacks = {
            "heartbeat": SimpleNamespace(stop=lambda: self.closed.append("no heartbeat"))
        }
        self.closed: list[Any] = []

    async def close(self, timeout: float, executor_wait: bool, nanny: bool, reason: str) -> str:
        self.closed.append((executor_wait, nanny, reason))
        return "OK"


BROKE = "worker-handle-scheduler-connection-broken"
UNKNOWN = "worker-heartbeat-missing"
REMOVED = "scheduler-remove-worker"


async def complete() -> None:
    """Complete no requests, as there are none."""


async def test_a_function_decides_what_becomes_of_a_worker_whose_stream_breaks() -> None:
    for outcome, closed in [
        (WorkerOutcome.STAYS, []),
        (WorkerOutcome.RESTARTS, [(False, False, BROKE)]),
        (WorkerOutcome.CLOSES, [(True, True, BROKE)]),
    ]:

        async def survive(outcome: WorkerOutcome = outcome) -> WorkerOutcome:
            return outcome

        worker: Any = ClosingWorker()
        answer_close(worker, survive, complete)
        await worker.close(reason=BROKE)
        assert worker.closed == closed, outcome
        stop_answering_close(worker)
        assert "close" not in vars(worker), outcome
        assert worker.stream_handlers == {"close": worker.close}, outcome


async def test_a_worker_that_is_asked_to_close_closes_while_its_scheduler_is_away() -> None:
    worker: Any = ClosingWorker()
    back = asyncio.Event()

    async def survive() -> WorkerOutcome:
        await back.wait()
        return WorkerOutcome.STAYS

    answer_close(worker, survive, complete)
    waiting = asyncio.create_task(worker.close(reason=BROKE))
    await asyncio.sleep(0)
    await worker.close(reason=UNKNOWN)  # of the next scheduler
    assert worker.closed == []
    await worker.close(nanny=False, reason="signal-15")
    assert worker.closed == [(True, False, "signal-15")]
    back.set()
    await waiting


async def test_a_worker_whose_survival_fails_closes_and_its_nanny_starts_another() -> None:
    worker: Any = ClosingWorker()

    async def survive() -> WorkerOutcome:
        raise ValueError("refused")

    answer_close(worker, survive, complete)
    with pytest.raises(ValueError, match="refused"):
        await worker.close(reason=BROKE)
    assert worker.closed == [(True, False, BROKE)]


async def stay() -> WorkerOutcome:
    return WorkerOutcome.STAYS


async def test_a_retired_worker_completes_its_requests_before_it_closes() -> None:
    for first in (BROKE, UNKNOWN, REMOVED):
        worker: Any = ClosingWorker()
        worker.status = Status.closing_gracefully
        done = asyncio.Event()

        async def complete(done: asyncio.Event = done) -> None:
            await done.wait()

        answer_close(worker, stay, complete)
        close = worker.stream_handlers["close"] if first == REMOVED else worker.close
        closing = asyncio.create_task(close(reason=first))
        await asyncio.sleep(0)
        for reason in (BROKE, UNKNOWN, REMOVED):
            assert await worker.close(reason=reason) is None, (first, reason)
        assert worker.closed == ["no heartbeat"], first
        done.set()
        assert await closing == "OK", first
        assert worker.closed == ["no heartbeat", (True, True, first)], first


async def test_a_worker_whose_lifetime_ends_completes_its_requests_and_keeps_its_nanny() -> None:
    lifetime = {"nanny": False, "reason": "worker-lifetime-reached"}
    for is_first in (True, False):  # or the scheduler's answer to the last heartbeat
        worker: Any = ClosingWorker()
        worker.status = Status.closing_gracefully
        done = asyncio.Event()

        async def complete(done: asyncio.Event = done) -> None:
            await done.wait()

        answer_close(worker, stay, complete)
        first, second = (lifetime, {"reason": UNKNOWN}) if is_first else ({"reason": UNKNOWN}, lifetime)
        closing = asyncio.create_task(worker.close(**first))
        await asyncio.sleep(0)
        assert await worker.close(**second) is None, first
        done.set()
        assert await closing == "OK", first
        assert worker.closed == ["no heartbeat", (True, False, first["reason"])], first


async def test_a_worker_closes_at_once_if_it_is_not_retired_or_something_else_closes_it() -> None:
    for status, reason in [
        (Status.running, REMOVED),  # it was lost for the scheduler: others have its actors
        (Status.closing_gracefully, "scheduler-close"),
        (Status.closing_gracefully, "signal-15"),
    ]:
        worker: Any = ClosingWorker()
        worker.status = status
        answer_close(worker, stay, asyncio.Event().wait)  # type: ignore[arg-type]
        assert await worker.close(reason=reason) == "OK"
        assert worker.closed == [(True, True, reason)], reason
