"""The `Cluster` protocol on a real Dask cluster: one process's view of one instance.

Hosts inside workers and user programs outside use the same class. Both have a Dask client (for the
scheduler and its topics) and a pool of channels (for requests to actors).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from distributed import Client, Worker

from daskserve._version import PROTOCOL, __version__
from daskserve.cluster.actors.calls import ProcessView, close_shared
from daskserve.cluster.actors.registry import ActorRegistry
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.dask.subscription import TopicSubscription
from daskserve.cluster.distributed_internals import call_scheduler, until_connected
from daskserve.cluster.parcel_memory import ParcelCarrier
from daskserve.cluster.protocols.base import ClusterConnection, TopicHandler
from daskserve.cluster.protocols.stores import StoreChange, StoreOwnership
from daskserve.cluster.protocols.usage import UsageReport
from daskserve.common.clock import Clock
from daskserve.common.types import ActorAddress, InstanceName, WorkerAddress, WorkerInfo
from daskserve.errors import (
    InstanceError,
    NotRunningError,
    ServeError,
    StoreLostError,
    StoreTakenError,
    UnavailableError,
)
from daskserve.payload.packed_errors import load_error
from daskserve.payload.parcels import Parcel
from daskserve.telemetry.collector import PROCESS

#: The scheduler handler that the supervisor plugin adds.
SUPERVISOR_OP = "daskserve"
#: Time after the scheduler's return in which an instance that it does not know may reconnect.
RECONNECT_S = 10.0


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
    answer = await call_scheduler(
        client, SUPERVISOR_OP, verb=verb, message=message, version=__version__, protocol=PROTOCOL
    )
    return _value_of(answer)


async def ask_from_worker(worker: Worker, verb: str, /, **message: Any) -> Any:
    """Call a verb of the supervisor over the worker's own connection; see `ask_supervisor`."""
    ask = getattr(worker.scheduler, SUPERVISOR_OP)
    return _value_of(await ask(verb=verb, message=message, version=__version__, protocol=PROTOCOL))


def _value_of(answer: Any) -> Any:
    if answer is None:  # Dask answers an unknown operation with None
        raise NotRunningError("No daskserve instance runs on this Dask cluster.")
    if "error" in answer:
        raise load_error(answer["error"])
    return answer["value"]


async def ask_if_supervised(client: Client, verb: str, **message: Any) -> Any:
    """Call a verb of the supervisor if there is one; see `ask_supervisor`.

    The scheduler logs a traceback if it is called for an operation that it does not have.
    """

    def find(dask_scheduler: Any) -> bool:  # pickled by value, because it is nested
        return "daskserve" in dask_scheduler.handlers

    await until_connected(client)
    if not await client.run_on_scheduler(find):
        raise NotRunningError("No daskserve instance runs on this Dask cluster.")
    return await ask_supervisor(client, verb, **message)


async def _ask_of_instance(client: Client, verb: str, *, instance: InstanceName, **message: Any) -> Any:
    """Call a verb for a change or a question to an instance; see `ask_supervisor`.

    Raises
    ------
    UnavailableError
        The scheduler was lost, or its successor does not know the instance, perhaps only for a moment. So the
        caller looks for the controller again, which shows whether the instance has ended.
    """
    try:
        return await ask_supervisor(client, verb, instance=instance, **message)
    except NotRunningError as error:
        raise UnavailableError(
            f"The instance has ended, or is being restarted on another scheduler: {error}"
        ) from error
    except OSError as error:
        raise _lost_scheduler(client, error) from error


def _lost_scheduler(client: Client, error: OSError) -> Exception:
    """Return the error of a call during which the scheduler was lost; the same error if the scheduler will
    not return."""
    if isinstance(error, ServeError) or client.status not in ("running", "connecting"):
        return error
    return UnavailableError(f"The scheduler was lost during a call: {error}")


class RemoteStore:
    """The instance's store, which lives in the scheduler process."""

    def __init__(self, client: Client, instance: InstanceName) -> None:
        self._client = client
        self._instance = instance

        self._problems: Mapping[str, str] = {}
        self._ownership = StoreOwnership.HELD

    async def load(self) -> Mapping[str, bytes]:
        found = await _ask_of_instance(self._client, "load_records", instance=self._instance)
        self.learn(found)
        records: Mapping[str, bytes] = found["records"]
        return records

    def problems(self) -> Mapping[str, str]:
        return dict(self._problems)

    @property
    def ownership(self) -> StoreOwnership:
        return self._ownership

    def learn(self, condition: Mapping[str, Any]) -> None:
        self._problems, self._ownership = condition["problems"], StoreOwnership(condition["hold"])

    async def commit(self, epoch: int, change: StoreChange) -> None:
        try:
            await self._write(
                "commit_records", epoch, change, must_last=change.must_last, may_wait=change.may_wait
            )
        except StoreLostError as error:
            self._problems = {**self._problems, "store": str(error)}
            raise
        except StoreTakenError as error:
            self._problems, self._ownership = {**self._problems, "store": str(error)}, StoreOwnership.TAKEN
            raise

    async def rewrite(self, epoch: int, change: StoreChange, unreadable: Sequence[str] = ()) -> None:
        await self._write("rewrite_records", epoch, change, unreadable=list(unreadable))

    async def take_over(
        self, epoch: int, *, is_complete: bool, own: Sequence[str]
    ) -> Mapping[str, bytes | None] | None:
        message: dict[str, Any] = {"epoch": epoch, "is_complete": is_complete, "own": list(own)}
        found = await _ask_of_instance(self._client, "take_over_records", instance=self._instance, **message)
        self.learn(found)
        changed: Mapping[str, bytes | None] | None = found["changed"]
        return changed

    async def _write(self, verb: str, epoch: int, change: StoreChange, **message: Any) -> None:
        condition = await _ask_of_instance(
            self._client,
            verb,
            instance=self._instance,
            epoch=epoch,
            records=dict(change.records),
            parcels=dict(change.parcels),
            **message,
        )
        self.learn(condition)


class RemoteTaskQueues:
    """The instance's queues of tasks, which live in the scheduler process."""

    def __init__(self, client: Client, instance: InstanceName) -> None:
        self._client, self._instance = client, instance

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        message = {"instance": self._instance, "method": method, "arguments": arguments}
        return await ask_supervisor(self._client, "call_task_queue", **message)


class DaskCluster(ProcessView):
    """The implementation of `daskserve.cluster.protocols.base.Cluster` on Dask.

    Parameters
    ----------
    client : distributed.Client
        The process's Dask client; every method runs on the client's own loop.
    connection
        The `daskserve.cluster.dask.connection.DaskConnection` to which this view belongs.
    local_worker, registry
        The worker of this process, and its actors; None outside workers.
    """

    def __init__(
        self,
        instance: InstanceName,
        client: Client,
        channels: ChannelPool,
        *,
        clock: Clock,
        connection: ClusterConnection,
        local_worker: Any = None,
        registry: ActorRegistry | None = None,
    ) -> None:
        super().__init__(instance, channels, registry, clock)
        self.store = RemoteStore(client, instance)
        self.tasks = RemoteTaskQueues(client, instance)
        self.connection = connection
        self._client = client
        self._worker = local_worker
        self._controller: ActorAddress | None = None
        self._parcels = ParcelCarrier(partial(_ask_of_instance, client, instance=instance))
        self._topic = TopicSubscription(client, topic_of(instance), clock)

    def _forget_worker(self, worker: WorkerAddress) -> None:
        super()._forget_worker(worker)
        if self._controller is not None and self._controller.worker == worker:
            self._controller = None

    def _mark_ended(self) -> None:
        super()._mark_ended()
        self._controller = None
        self._topic.end()  # the scheduler keeps the topic while this process listens

    async def close(self) -> None:
        """Stop listening. The Dask client and the channels stay open: the connection owns them."""
        has_ended = self.is_ended
        self._mark_ended()
        if self._listener is not None:
            await self._listener.stop()
        close_shared(self)
        for each in self.shared.values():
            PROCESS.remove(each)
        if has_ended:
            PROCESS.forget(self.instance)

    async def workers(self) -> Sequence[WorkerInfo]:
        answer = await _ask_of_instance(self._client, "workers", instance=self.instance)
        return [WorkerInfo(**worker) for worker in answer["workers"]]

    async def refused_workers(self) -> Mapping[WorkerAddress, str]:
        answer = await _ask_of_instance(self._client, "workers", instance=self.instance)
        refused: Mapping[WorkerAddress, str] = answer["refused"]
        return refused

    async def inspect(
        self, worker: WorkerAddress, *, metrics_of: Collection[str] = (), by_scheduler: bool = False
    ) -> Sequence[Mapping[str, Any]]:
        if not by_scheduler:
            return await super().inspect(worker, metrics_of=metrics_of)
        message: dict[str, Any] = {
            "instance": self.instance,
            "worker": worker,
            "metrics_of": list(metrics_of),
        }
        actors: Sequence[Mapping[str, Any]] = await _ask_of_instance(self._client, "inspect", **message)
        return actors

    async def report(self, epoch: int, report: UsageReport) -> bool:
        message: dict[str, Any] = {"instance": self.instance, "epoch": epoch, **report.plain()}
        is_adaptive: bool = await _ask_of_instance(self._client, "report", **message)
        return is_adaptive

    async def restart_worker(self, epoch: int, worker: WorkerAddress) -> None:
        message: dict[str, Any] = {"instance": self.instance, "epoch": epoch, "worker": worker}
        await _ask_of_instance(self._client, "restart_worker", **message)

    async def send_parcel(self, parcel: Parcel, parts: Sequence[Any]) -> None:
        await self._parcels.send(parcel, parts)

    async def fetch_parcel(self, code: str, parcel: Parcel) -> Sequence[Any]:
        return await self._parcels.fetch(code, parcel)

    async def controller(self) -> ActorAddress:
        if self.is_ended:
            raise NotRunningError(f"Instance {self.instance!r} has been shut down.")
        if self._controller is None:
            try:
                ask = ask_if_supervised if self._worker is None else ask_supervisor
                found = await ask(self._client, "controller", instance=self.instance)
            except NotRunningError as error:
                if self.resumed_at is None or self.clock.now() > self.resumed_at + RECONNECT_S:
                    raise
                raise UnavailableError(
                    f"Instance {self.instance!r} is reconnecting: its scheduler was replaced, and the new "
                    "one does not know it yet."
                ) from error
            except OSError as error:
                raise _lost_scheduler(self._client, error) from error
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
        return await self._topic.subscribe(handler)

    async def resume(self) -> None:
        """Listen to the scheduler that replaced a lost one, and fetch missed changes."""
        self.resumed_at = self.clock.now()
        self._controller = None
        await self._topic.resume()
        if self._listener is not None:
            self._listener.refresh()
