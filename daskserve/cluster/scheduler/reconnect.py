"""Instances that reconnect: their workers have outlived another scheduler and register with this one.

Each worker requests each of its instances until it runs. After the first request, the instance waits until
all its known workers are back, or until a time limit. If its controller started earlier, it would treat the
missing workers as lost, and replace their actors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler

from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.owned_store import OwnedStore
from daskserve.cluster.store.opening import is_in_memory
from daskserve.common.types import InstanceName, WorkerAddress
from daskserve.errors import InstanceError, ServeError, UnavailableError

logger = logging.getLogger("daskserve.supervisor")

#: How long an instance waits for known workers, and for other workers.
KNOWN_S = 3.0
UNKNOWN_S = 1.0
#: How long the end of an instance waits for its store.
RELEASE_S = 5.0
#: Interval of the checks whether the workers are there.
CHECK_S = 0.02
#: How long an instance counts as returning after a worker last asked for it. Workers ask more
#: often, and a supervisor without an instance stays for longer.
ASKED_S = 1.5


@dataclass(slots=True)
class KnownInstance:
    """The known state of an instance that reconnects.

    Attributes
    ----------
    epoch
        The newest epoch among the actors.
    records
        The records of the newest controller; None if they are not known.
    is_trial
        Whether it had not taken over its store yet.
    """

    epoch: int = 0
    records: Mapping[str, bytes] | None = None
    is_trial: bool = False


@dataclass(slots=True)
class _ReconnectingInstance:
    """An instance that is about to start."""

    start: Mapping[str, Any]
    began_at: float
    workers: set[WorkerAddress] = field(default_factory=set)
    known: KnownInstance = field(default_factory=KnownInstance)
    #: The epoch of the controller that sent the records.
    records_epoch: int = 0

    def is_due(self, current: Collection[WorkerAddress], now: float) -> bool:
        """Return whether the instance should start, with these workers in the cluster."""
        waited_s = now - self.began_at
        if not current:
            return waited_s >= float(self.start["timeout_s"])
        # The records show that a controller has reported its workers.
        is_complete = self.known.records is not None
        if is_complete and self.workers <= set(current):
            return True
        return waited_s >= (KNOWN_S if is_complete else UNKNOWN_S)


@dataclass(slots=True)
class _Failure:
    """Why an instance could not be brought back, and the time until which its workers may still ask for
    it."""

    reason: str
    until: float


class ReconnectingInstances:
    """The instances that reconnect; see the module.

    Parameters
    ----------
    start
        Starts an instance, given a `KnownInstance` and the message that started the instance before.
    end_after
        Ends an instance after a delay, unless its owner connects.
    spawn
        Runs a coroutine as a task of the supervisor.
    attempted
        Called after each attempt to start an instance.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        instances: Mapping[InstanceName, Instance],
        start: Callable[..., Awaitable[Any]],
        end_after: Callable[[Instance, float], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], Any],
        attempted: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._instances = instances
        self._start = start
        self._end_after = end_after
        self._spawn = spawn
        self._attempted = attempted
        self._reconnecting: dict[InstanceName, _ReconnectingInstance] = {}
        self._failures: dict[InstanceName, _Failure] = {}

    @property
    def are_pending(self) -> bool:
        """Whether an instance is about to start."""
        now = asyncio.get_running_loop().time()
        return bool(self._reconnecting) or any(now < each.until for each in self._failures.values())

    def check(self, instance: InstanceName) -> None:
        """Raise `UnavailableError` with the reason if an instance serves, but is not back yet."""
        failure = self._failures.get(instance)
        if failure is not None and asyncio.get_running_loop().time() < failure.until:
            raise UnavailableError(f"Instance {instance!r} serves, but cannot be changed: {failure.reason}")

    async def bring_back(
        self,
        start: Mapping[str, Any],
        worker: WorkerAddress,
        workers: Collection[WorkerAddress] = (),
        epoch: int = 0,
        records: Mapping[str, bytes] | None = None,
        is_trial: bool = False,
    ) -> bool:
        """Return whether an instance runs; if it does not, begin to start it.

        Parameters
        ----------
        worker
            The calling worker.
        epoch
            The newest epoch among the worker's actors.
        workers, records, is_trial
            The knowledge of the instance's old controller, if the worker has it.
        """
        name = start["instance"]
        if name in self._instances:
            running = self._instances[name]
            # Without a controller, the supervisor tries again, and the actors keep serving.
            return running.controller is not None or (running.has_begun.is_set() and not running.is_ending)
        if name in self._failures:
            self._failures[name].until = asyncio.get_running_loop().time() + ASKED_S
        entry = self._reconnecting.get(name)
        if entry is None:
            if is_in_memory(start["store"]) and records is None:
                return False  # only the worker with the controller has the records
            entry = self._reconnecting[name] = _ReconnectingInstance(start, asyncio.get_running_loop().time())
            self._spawn(self._begin(name, entry))
        entry.workers |= {worker, *workers}
        known = entry.known
        known.epoch = max(known.epoch, epoch)
        if records is not None and epoch >= entry.records_epoch:
            known.records, known.is_trial, entry.records_epoch = records, is_trial, epoch
        return False

    async def _begin(self, name: InstanceName, entry: _ReconnectingInstance) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not entry.is_due(self._scheduler.workers, loop.time()):  # noqa: ASYNC110 - many causes
                await asyncio.sleep(CHECK_S)
            missing = entry.workers - set(self._scheduler.workers)
            log = logger.info if name in self._failures else logger.warning
            log(
                "Instance %s comes back on %d workers; lost: %s",
                name,
                len(self._scheduler.workers),
                ", ".join(sorted(missing)) or "none",
            )
            await self._start(entry.known, **entry.start)
            self._failures.pop(name, None)
            instance = self._instances.get(name)
            if instance is not None and instance.owner not in (None, *self._scheduler.clients):
                self._end_after(instance, instance.grace_s)
        except (OSError, ServeError) as error:
            before, reason = self._failures.get(name), str(error)
            self._failures[name] = _Failure(reason, loop.time() + ASKED_S)
            if before is None or before.reason != reason:
                logger.error("Instance %s could not be brought back; this is tried again: %s", name, reason)
        finally:
            del self._reconnecting[name]
            self._attempted()


async def open_records(entry: Instance, url: str, back: KnownInstance | None) -> None:
    """Open the store of an instance that starts or reconnects."""
    await entry.store.open()
    known = back or KnownInstance()
    await restore(entry, url, known.epoch, known.records)
    if isinstance(entry.store, OwnedStore):
        await entry.store.begin(reconnects=back is not None, epoch=known.epoch, records=known.records)


def check_reconnected(entry: Instance, back: KnownInstance | None) -> None:
    """Raise an error if a returning instance had not taken over its store, so that its start failed.

    Call this once the workers are back, because their actors are stopped after the error.
    """
    if back is not None and back.is_trial:
        raise InstanceError(f"The start of {entry.name!r} had not completed when the scheduler was lost.")


async def close_records(entry: Instance) -> None:
    """Release the records of an instance that ends, and close its store, parcels and task queues."""
    entry.parcels.close()
    if entry.watching is not None:
        entry.watching.cancel()
    try:
        async with asyncio.timeout(RELEASE_S):
            await entry.store.release(gives_back=entry.has_failed)
    except (OSError, ServeError) as error:
        logger.warning("Instance %s ended without releasing its store: %s", entry.name, error)
    await entry.tasks.close()
    await entry.store.close()


async def restore(entry: Instance, url: str, epoch: int, records: Mapping[str, bytes] | None) -> None:
    """Restore a store that was lost together with the scheduler from the last controller's records.

    Even if no records are known, new epochs become newer than those of the actors, so that actors without a
    record are recognized.
    """
    if await entry.store.newest_epoch() >= epoch:
        return
    if not is_in_memory(url):
        logger.error(
            "Store %s has lost the records that instance %s wrote while the scheduler was away; %s",
            url,
            entry.name,
            "the records are lost" if records is None else "the last controller's records are written to it",
        )
    if records is not None:
        await entry.store.rewrite(epoch, StoreChange(records))
    else:
        await entry.store.commit(epoch, StoreChange({}))
