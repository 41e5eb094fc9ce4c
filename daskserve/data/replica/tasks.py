"""The tasks of a replica, which it takes from a queue and answers like calls.

Each task is a request to the replica. So it has a slot, and is logged, traced, counted, drained and cancelled
like a handle call, even in a child process. The task's id is the request's id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from daskserve.cluster.protocols.base import ContextWith
from daskserve.common.types import (
    Envelope,
    EnvelopeKind,
    Message,
    Payload,
    QueueTimeout,
    nothing_to_receive,
    short_tag,
)
from daskserve.context import HasConnection
from daskserve.data.replica.code_protocol import UserCode
from daskserve.data.tasks.consumer import Failure, Lost, Released, TaskConsumer
from daskserve.data.tasks.payloads import error_text, joined, parted
from daskserve.data.tasks.queues.instance import InstanceQueue
from daskserve.data.tasks.states import Task, TaskState
from daskserve.errors import ActorLostError, ReplicaBusyError, ReplicaStartError
from daskserve.options.start_messages import ReplicaStart
from daskserve.payload.packed_errors import packed_here, unpacked
from daskserve.payload.pickling import dump, load_bytes
from daskserve.telemetry.table import MetricSample

if TYPE_CHECKING:  # slow to import, and few replicas consume tasks
    from daskserve.data.tasks.adapter import TaskProcessorAdapter
    from daskserve.data.tasks.decorator import ConsumerSpec
    from daskserve.data.tasks.durable import DurableAdapter

logger = logging.getLogger("daskserve.replica")

#: How long a task waits for a slot. After that, it returns to the queue, for any replica.
SLOT_PATIENCE_S = 2.0
#: The same for a task that cannot return to the queue, because the adapter is not daskserve's.
LONG_PATIENCE_S = 3600.0
#: The maximum waiting time of a task that counts in the queue for a slot.
LONGEST_WAIT_S = 3600.0
#: Maximum time for which requests may take slots from the share of tasks.
SHORT_S = 1.0
#: The pause after a task found no slot.
BUSY_PAUSE_S = 0.2


class TaskSlots:
    """Computes how many tasks a replica may run beside its requests.

    Requests come first. But a constant stream of requests would leave no slot for tasks. So once tasks have
    had fewer slots than their share for `SHORT_S`, they wait for slots of that share like requests, ordered
    by waiting time. If the share covers all slots, only requests get slots for `SHORT_S` after each task.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._short_since: float | None = None

    def __call__(self, concurrency: int, ongoing: int, running: int, now: float) -> int:
        """Return how many tasks may run or wait; ``running`` is the number of tasks that do so now."""
        left = max(0, concurrency - max(0, ongoing - running))
        least = max(1, int(self._share * concurrency)) if self._share else 0
        if running and least >= concurrency:
            self._short_since = now
        if left >= least:
            if not running:
                self._short_since = None
            return left
        if self._short_since is None:
            self._short_since = now
        return least if now - self._short_since >= SHORT_S else left


class ReplicaTasks:
    """The consumer of one replica's tasks; idle until `start` is called."""

    def __init__(self, context: ContextWith[HasConnection], start: ReplicaStart, code: UserCode) -> None:
        self._context, self._code = context, code
        self._tag, self._display_name = start.replica_tag, start.display_name
        self._spec: ConsumerSpec | None = None
        self._adapter: TaskProcessorAdapter | None = None
        self._consumer: TaskConsumer | None = None
        self._task_slots: TaskSlots | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._is_stopping = False

    async def start(self, packed: bytes) -> None:
        """Open the queue of a pickled `ConsumerSpec`, and consume it.

        Raises
        ------
        ReplicaStartError
            It cannot be opened.
        """
        concurrency = self._code.slots.concurrency
        failure: ReplicaStartError | None = None
        durable: DurableAdapter | None = None
        # Separate threads, because a queue that does not answer must not block the worker's threads.
        self._threads = ThreadPoolExecutor(2, "daskserve-task-queue")
        call = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        try:
            spec, adapter, durable = await call(_opened, packed)
            self._spec, self._adapter = spec, adapter
            self._task_slots = TaskSlots(spec.config.slot_share)
            if durable is not None and isinstance(durable.queue, InstanceQueue):
                durable.queue.join(self._context.cluster.connection, self._context.spec.instance)
            await call(adapter.initialize, concurrency)
            if durable is None:
                for name, method in spec.handlers.items():
                    adapter.register_task_handle(self._handler(name, method), name)
                await call(adapter.start_consumer)
        except Exception as error:
            packed_error = packed_here(error)
            text = f"{self._display_name} cannot consume its tasks: {packed_error.summary}"
            failure = ReplicaStartError(text, user_traceback=packed_error.text)
        if failure is not None:
            raise failure
        if durable is not None:
            from daskserve.data.tasks.durable import new_consumer

            run, clock, rng = partial(self._run, durable), self._context.clock, self._context.rng
            self._consumer = new_consumer(
                durable, self._tag, spec.handlers, run, self._room, clock=clock, rng=rng, call=call
            )
            self._consumer.start()

    def _room(self) -> int:
        """Return how many tasks may run."""
        slots = self._code.slots
        if not slots.is_open or self._consumer is None or self._task_slots is None:
            return 0
        now = self._context.clock.now()
        return self._task_slots(slots.concurrency, slots.ongoing, self._consumer.running, now)

    # ---- running

    async def _run(self, adapter: DurableAdapter, task: Task) -> bytes:
        from daskserve.data.tasks.durable import checked_result

        assert self._spec is not None
        facts = {"task": (task.id, task.name, task.queue, task.attempts)}
        waited_s = min(LONGEST_WAIT_S, max(0.0, self._context.clock.wall() - task.due_at))
        patience = QueueTimeout(SLOT_PATIENCE_S, waited_s)
        method, arguments = self._spec.handlers[task.name], parted(task.payload)
        try:
            payload = await self._begun(method, arguments, patience, task.id, facts)
        except (Released, Lost):
            raise
        except Exception as error:
            failure = packed_here(error)
            raise Failure(error_text(failure.summary, failure.text)) from None
        return checked_result(task, joined(payload), adapter.config.adapter_config)

    async def _begun(self, *parts: Any) -> Payload:
        """The same as `_call`, but raises `Released` or `Lost` if the replica cannot finish the task."""
        try:
            return await self._call(*parts)
        except ReplicaBusyError:
            await self._context.clock.sleep(BUSY_PAUSE_S)
            raise Released from None
        except ActorLostError as error:
            if self._is_stopping or not error.begun:
                raise Released from None
            raise Lost from None

    async def _call(
        self, method: str, payload: Payload, queue_timeout: QueueTimeout, id: str = "", facts: Any = None
    ) -> Payload:
        answers: list[Message] = []

        async def send(message: Message) -> None:
            answers.append(message)

        head = {"method": method, "request_id": id, **({} if facts is None else {"facts": facts})}
        envelope = Envelope(EnvelopeKind.CALL, head, payload, has_body=False, queue_timeout=queue_timeout)
        await self._code.handle(envelope).respond(nothing_to_receive, send)
        result: Payload = answers[-1]["payload"]
        return result

    def _handler(self, name: str, method: str) -> Callable[..., Any]:
        """Return a function that runs a task from any thread, for adapters that call it."""
        loop = asyncio.get_running_loop()

        def run(*args: Any, **kwargs: Any) -> Any:
            call = self._begun(method, dump((args, kwargs), is_final=True), QueueTimeout(LONG_PATIENCE_S))
            try:
                return asyncio.run_coroutine_threadsafe(call, loop).result().load()
            except (Released, Lost):
                raise
            except Exception as error:
                raise unpacked(error) from None

        run.__name__ = run.__qualname__ = name
        return run

    def samples(self, labels: tuple[str, str, str]) -> list[MetricSample]:
        """Return the metrics of the replica's queue, with the replica's ``labels``."""
        consumer = self._consumer
        if consumer is None or self._spec is None:
            return []
        queue, stats = self._spec.config.queue_name, consumer.stats
        return [
            *(
                ("task_queue_tasks", (*labels, queue, state), stats.counts.get(state, 0))
                for state in TaskState
            ),
            ("task_queue_oldest_seconds", (*labels, queue), stats.oldest_s),
            *(
                ("tasks_ended", (*labels[:2], queue, state), count)
                for state, count in list(consumer.totals.items())
            ),
        ]

    # ---- stop

    def pause(self) -> None:
        """Take no more tasks."""
        self._is_stopping = True
        if self._consumer is not None:
            self._consumer.pause()
        elif self._adapter is not None:
            try:
                self._adapter.pause_consumer()
            except Exception:  # raised by a user's adapter
                logger.exception("Replica %s could not pause its consumer", short_tag(self._tag))

    async def close(self, grace_s: float) -> None:
        """Return the running tasks to the queue, and close it."""
        self.pause()
        adapter = self._adapter
        if self._threads is None:
            return
        # The other threads may wait for a queue that does not answer.
        closing = ThreadPoolExecutor(1, "daskserve-task-queue")
        call = partial(asyncio.get_running_loop().run_in_executor, closing)
        stops: list[Callable[[], Awaitable[Any]]] = []
        if self._consumer is not None:
            stops.append(partial(self._consumer.close, grace_s))
        elif adapter is not None:
            stops.append(partial(call, adapter.stop_consumer, grace_s))
        if adapter is not None:
            stops.append(partial(call, adapter.shutdown))
        try:
            for stop in stops:
                try:
                    await stop()
                except Exception:  # raised by a user's adapter
                    logger.exception("Replica %s could not close its queue of tasks", short_tag(self._tag))
        finally:
            for each in (self._threads, closing):
                each.shutdown(wait=False)


def _opened(packed: bytes) -> tuple[ConsumerSpec, TaskProcessorAdapter, DurableAdapter | None]:
    """Return a pickled `ConsumerSpec`, its adapter, and the adapter again if its queue is daskserve's."""
    from daskserve.data.tasks.adapter import made_adapter
    from daskserve.data.tasks.durable import DurableAdapter

    spec: ConsumerSpec = load_bytes(packed)
    adapter = made_adapter(spec.config)
    return spec, adapter, adapter if isinstance(adapter, DurableAdapter) else None
