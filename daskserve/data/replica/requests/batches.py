"""Classic batches of a replica: the queues of requests, and the runs of batches in the executor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from daskserve.common.types import short_tag
from daskserve.data.batching.early_start import EarlyStart
from daskserve.data.batching.limits import BatchLimits
from daskserve.data.batching.queue import BatchQueue
from daskserve.data.multiplexing.ids import model_named_in
from daskserve.data.replica.errors.log import FailureLog
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.execution.runner import RunResult
from daskserve.data.replica.requests.accept_batch import (
    BatchItem,
    ItemOutcome,
    answer_batch,
    answer_batch_in_thread,
)
from daskserve.data.replica.requests.slots import Slots
from daskserve.data.replica.user_code.definitions import Method
from daskserve.data.replica.user_code.request_objects import request_id_of
from daskserve.data.replica.user_code.servable import Servable
from daskserve.payload.packed_errors import PackedError
from daskserve.telemetry.replica import ReplicaMetrics
from daskserve.telemetry.tracing.batches import SpansOfBatch

#: Keeps the slot of a request, and returns a function that releases it; see
#: `daskserve.data.replica.requests.replica_request.ReplicaRequest.hold`.
HoldSlot: TypeAlias = Callable[[], Callable[[], None]]


class BatchResult(RunResult):
    """The result of one batch, whose requests keep their slots until it has ended."""

    __slots__ = ("releases",)

    def __init__(self) -> None:
        super().__init__()
        #: Functions that release the slots of the batch's requests.
        self.releases: list[Callable[[], None]] = []

    def run_ended(self, value: Any, error: Exception | None) -> None:
        for release in self.releases:
            release()
        super().run_ended(value, error)

    def run_aborted(self, error: Exception) -> None:
        super().run_ended(None, error)


class ReplicaBatches:
    """The queues of one replica, one for each of its methods that takes batches.

    Parameters
    ----------
    running : callable
        Returns the replica's executor and servable; raises if the replica has stopped.
    """

    def __init__(
        self,
        running: Callable[[], tuple[UserExecutor, Servable]],
        limits: BatchLimits,
        slots: Slots,
        metrics: ReplicaMetrics,
        failures: FailureLog,
    ) -> None:
        self._running = running
        self._failures = failures
        self._metrics = metrics
        self._limits = limits
        self._slots = slots
        #: The queue of each method, by its name.
        self.queues: dict[str, BatchQueue[tuple[BatchItem, HoldSlot], ItemOutcome]] = {}

    def queued(self) -> int:
        """Return how many requests wait for their batch to run."""
        return sum(queue.queued() for queue in list(self.queues.values())) if self.queues else 0

    def reconfigure(self, max_batch_size: int | None, wait_s: float) -> None:
        """Change the limits, even for requests that are already waiting."""
        self._limits.max_batch_size = max_batch_size or 1
        self._limits.wait_s = wait_s
        for queue in self.queues.values():
            queue.reconsider()

    async def submit(self, method: Method, item: BatchItem, hold: HoldSlot, priority: int) -> ItemOutcome:
        """Return the outcome of a request; it holds its slot until its whole batch has ended."""
        queue = self.queues.get(method.name)
        if queue is None:
            # A plain function runs one batch at a time; further requests are collected during that time.
            counts = self._metrics.batches_of(method.name)
            name = f"{method.name} in replica {short_tag(self._slots.replica_tag)}"
            queue = self.queues[method.name] = BatchQueue(
                partial(self._run, method),
                self._limits,
                max_running=None if method.is_async else 1,
                on_batch=counts.observe,
                on_end=counts.ended,
                early_start=EarlyStart(self._slots.usage, name),
            )
            counts.watch_queue(queue.queued)
        try:
            return await queue.submit((item, hold), model_named_in(item.head), priority)
        finally:
            if item.span is not None:  # the span of a request that left before its batch ran
                item.span.end()

    async def _run(self, method: Method, entries: list[tuple[BatchItem, HoldSlot]]) -> list[ItemOutcome]:
        executor, servable = self._running()
        items = [item for item, _ in entries]
        answer: Any = answer_batch if method.is_async else answer_batch_in_thread
        parts = (servable.bound(method), servable.describe(method), items)
        result = BatchResult()
        context = executor.context.copy()
        spans = SpansOfBatch(method.name, [item.span for item in items])
        context.run(spans.__enter__)
        try:
            run = executor.start(method.is_async, answer, parts, context, result)
            result.releases = [hold() for _, hold in entries]
            outcomes: list[ItemOutcome] = await result.wait(run)
        except PackedError as error:  # an error that would have ended the thread or the loop
            outcomes = [error] * len(items)
        finally:
            spans.end()
        return await self._pack(executor, items, outcomes)

    async def _pack(
        self, executor: UserExecutor, items: list[BatchItem], outcomes: list[ItemOutcome]
    ) -> list[ItemOutcome]:
        """Pack the errors among the outcomes; log each error once, with the ids of its requests."""
        errors = {id(each): each for each in outcomes if isinstance(each, Exception)}
        packing = [executor.packers.pack(each, executor.context) for each in errors.values()]
        packed = dict(zip(errors, await asyncio.gather(*packing), strict=True))
        for number, error in packed.items():
            ids = [
                request_id_of(item.head)
                for item, outcome in zip(items, outcomes, strict=True)
                if id(outcome) == number
            ]
            executor.context.copy().run(self._failures.log, error, *ids)
            error.error = None  # the error refers to the user's object
        return [packed.get(id(each), each) for each in outcomes]
