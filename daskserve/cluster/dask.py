"""The `Cluster` protocol on a real Dask cluster: one process's view of one instance.

Hosts inside workers and user programs outside use the same class. Both have a Dask client (for the
scheduler and its topics) and a pool of channels (for requests to actors).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from distributed import Client

from daskserve._version import __version__
from daskserve.clock import Clock
from daskserve.cluster.actor_book import ActorBook
from daskserve.cluster.actor_calls import ActorCalls
from daskserve.cluster.base import Link, StoreChange, TopicHandler, UseReport
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.distributed_internals import call_scheduler
from daskserve.cluster.long_poll import LongPollClient
from daskserve.cluster.parcel_memory import ParcelCarrier
from daskserve.errors import InstanceError, NotRunningError
from daskserve.figures.collector import PROCESS
from daskserve.payload.packed_errors import load_error
from daskserve.payload.parcels import Parcel
from daskserve.types import ActorAddress, InstanceName, WorkerAddress, WorkerInfo

#: The scheduler handler that the supervisor plugin adds.
SUPERVISOR_OP = "daskserve"
MARKER_RETRY_S = 0.005
MAX_MARKER_RETRY_S = 0.5


def topic_of(instance: InstanceName) -> str:
    """Return the name of an instance's topic."""
    return f"daskserve/{instance}"


async def ask_supervisor(client: Client, verb: str, **message: Any) -> Any:
    """Call a verb of the supervisor in the scheduler.

    Raises
    ------
    NotRunningError
        There is no supervisor: no instance runs on this cluster.
    ServeError
        The error of the verb.
    OSError
        The scheduler cannot be reached.
    """
    answer = await call_scheduler(client, SUPERVISOR_OP, verb=verb, message=message, version=__version__)
    if answer is None:  # Dask's answer to an operation it does not know
        raise NotRunningError("No daskserve instance runs on this Dask cluster.")
    if "error" in answer:
        raise load_error(answer["error"])
    return answer["value"]


class RemoteStore:
    """The instance's store, which lives in the scheduler process."""

    def __init__(self, client: Client, instance: InstanceName) -> None:
        self._client = client
        self._instance = instance

        self._problems: Mapping[str, str] = {}

    async def load(self) -> Mapping[str, bytes]:
        found = await ask_supervisor(self._client, "load_records", instance=self._instance)
        self._problems = found["problems"]
        records: Mapping[str, bytes] = found["records"]
        return records

    def problems(self) -> Mapping[str, str]:
        return dict(self._problems)

    async def commit(self, epoch: int, change: StoreChange) -> None:
        await ask_supervisor(
            self._client,
            "commit_records",
            instance=self._instance,
            epoch=epoch,
            records=dict(change.records),
            parcels=dict(change.parcels),
        )


class DaskCluster(ActorCalls):
    """The implementation of `daskserve.cluster.base.Cluster` on Dask.

    Parameters
    ----------
    client : distributed.Client
        The process's Dask client; every method runs on the client's own loop.
    link
        The `daskserve.cluster.link.DaskLink` to which this view belongs.
    local_worker, book
        The worker of this process, and its actors; None outside workers.
    """

    def __init__(
        self,
        instance: InstanceName,
        client: Client,
        channels: ChannelPool,
        *,
        clock: Clock,
        link: Link,
        local_worker: Any = None,
        book: ActorBook | None = None,
    ) -> None:
        super().__init__(instance, channels, book)
        self.clock = clock
        self.store = RemoteStore(client, instance)
        self.link = link
        #: Objects that the layers above keep once per process and instance, by name.
        self.shared: dict[str, Any] = {}
        self._client = client
        self._worker = local_worker
        self._controller: ActorAddress | None = None
        self._listener: LongPollClient | None = None
        self._parcels = ParcelCarrier(partial(ask_supervisor, client, instance=instance))
        self.is_ended = False
        self._handlers: list[TopicHandler] = []
        self._subscribing: asyncio.Future[None] | None = None

    @property
    def listener(self) -> LongPollClient:
        """This process's long-poll client for the instance; created on first use, not yet started."""
        if self._listener is None:
            self._listener = LongPollClient(self, self.clock)
            self._listener.on_worker_left(self._forget_worker)
            self._listener.on_ended(self._mark_ended)
        return self._listener

    def _forget_worker(self, worker: WorkerAddress) -> None:
        self._channels.drop(worker)
        if self._controller is not None and self._controller.worker == worker:
            self._controller = None

    def _mark_ended(self) -> None:
        self.is_ended = True
        self._controller = None
        if self._subscribing is not None and self._subscribing.done():
            self._unsubscribe()  # the scheduler keeps the topic while this process listens

    async def close(self) -> None:
        """Stop listening. The Dask client and the channels stay open: the link owns them."""
        has_ended = self.is_ended
        self._mark_ended()
        if self._listener is not None:
            await self._listener.stop()
        for each in self.shared.values():
            PROCESS.remove(each)
        if has_ended:
            PROCESS.forget(self.instance)

    async def workers(self) -> Sequence[WorkerInfo]:
        answer = await ask_supervisor(self._client, "workers")
        return [WorkerInfo(**worker) for worker in answer["workers"]]

    async def refused_workers(self) -> Mapping[WorkerAddress, str]:
        answer = await ask_supervisor(self._client, "workers")
        refused: Mapping[WorkerAddress, str] = answer["refused"]
        return refused

    async def report(self, epoch: int, report: UseReport) -> bool:
        is_adaptive: bool = await ask_supervisor(
            self._client,
            "report",
            instance=self.instance,
            epoch=epoch,
            in_use=sorted(report.in_use),
            retiring=sorted(report.retiring),
            waiting_workers=report.waiting_workers,
        )
        return is_adaptive

    async def restart_worker(self, worker: WorkerAddress) -> None:
        await ask_supervisor(self._client, "restart_worker", worker=worker)

    async def send_parcel(self, parcel: Parcel, parts: Sequence[Any]) -> None:
        await self._parcels.send(parcel, parts)

    async def fetch_parcel(self, code: str, parcel: Parcel) -> Sequence[Any]:
        return await self._parcels.fetch(code, parcel)

    async def controller(self) -> ActorAddress:
        if self.is_ended:
            raise NotRunningError(f"Instance {self.instance!r} has been shut down.")
        if self._controller is None:
            found = await ask_supervisor(self._client, "controller", instance=self.instance)
            self._controller = ActorAddress(**found)
        return self._controller

    def forget_controller(self) -> None:
        """Look up the controller again at the next call, because the last call did not reach it."""
        self._controller = None

    def publish(self, message: Any) -> None:
        if self._worker is None:
            raise InstanceError("Only actors publish on an instance's topic.")
        self._worker.log_event(topic_of(self.instance), message)

    async def subscribe(self, handler: TopicHandler) -> Callable[[], Awaitable[None]]:
        # Dask has one handler per client and topic, so the process subscribes once for all its listeners.
        self._handlers.append(handler)
        try:
            if self._subscribing is None or self._subscribing.cancelled():
                self._subscribing = asyncio.ensure_future(self._subscribe())
            await asyncio.shield(self._subscribing)
        except BaseException:
            self._handlers.remove(handler)
            if not self._handlers:
                self._subscribing = None
            raise

        async def unsubscribe() -> None:
            if handler in self._handlers:
                self._handlers.remove(handler)
            if not self._handlers:
                self._unsubscribe()

        return unsubscribe

    def _unsubscribe(self) -> None:
        if self._subscribing is not None:
            self._subscribing = None
            if self._client.status == "running":
                self._client.unsubscribe_topic(topic_of(self.instance))

    async def _subscribe(self) -> None:
        topic = topic_of(self.instance)
        marker = uuid.uuid4().hex
        seen = asyncio.Event()

        def hear(event: tuple[float, Any]) -> None:
            message = event[1]
            if message.get("kind") == "marker":
                if message["id"] == marker:
                    seen.set()
                return
            for each in list(self._handlers):
                each(message)

        # Dask does not acknowledge a subscription; receiving our own marker event proves that it is active.
        patience_s = MARKER_RETRY_S
        while not seen.is_set():
            self._client.subscribe_topic(topic, hear)
            await self._client.log_event(topic, {"kind": "marker", "id": marker})
            with contextlib.suppress(TimeoutError):
                await self.clock.wait_for(seen.wait(), patience_s)
            patience_s = min(MAX_MARKER_RETRY_S, patience_s * 2)
