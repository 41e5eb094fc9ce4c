"""The supervisor's registry of Hosts: which workers have one, which are refused, and why."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, Future, Scheduler, wait
from distributed.comm import get_address_host

from daskserve.cluster.actors.calls import list_actors
from daskserve.cluster.channel.connect.keyring import ChannelSecret
from daskserve.cluster.distributed_internals import (
    break_stream,
    call_actor,
    connect_comm,
    get_ip,
    is_running,
)
from daskserve.cluster.probe import mismatch, version_probe
from daskserve.cluster.reserved_resources import ReservedResources
from daskserve.cluster.worker.host import Host, current_host
from daskserve.common.formatting import shown
from daskserve.common.types import ActorAddress, InstanceName, WorkerAddress
from daskserve.errors import (
    ActorLostError,
    InstanceError,
    ServeError,
    UnavailableError,
    VersionMismatchError,
)
from daskserve.loops.tasks import TaskSet
from daskserve.payload.packed_errors import load_error

logger = logging.getLogger("daskserve.supervisor")

#: The scheduler's attribute that holds the secret of its cluster.
_SECRET = "_daskserve_channel_secret"
#: Prefix of the Dask keys of Hosts.
HOST_KEY = "daskserve-host-"
#: Timeout of the version probe; a worker that does not answer is refused until it joins again.
PROBE_TIMEOUT_S = 5.0
#: Once one Host is open, the start of the first instance waits this long for the others.
STRAGGLER_S = 2.0
#: Timeout for stopping the actors of one worker when their instance ends.
END_TIMEOUT_S = 4.0
#: Timeout of the answer to `HostRegistry.inspect`: the caller has given up by then.
INSPECT_S = 2.0
#: Time limit for an answer of a worker, before it is restarted as unresponsive.
ANSWER_S = 0.5
#: How often to check whether Dask has forgotten a released Host, which takes milliseconds.
RELEASE_POLL_S = 0.005


def secret_of(scheduler: Scheduler) -> ChannelSecret:
    """Return the secret of a scheduler's cluster, generated on first use.

    It outlives the supervisor. Programs keep the secret, and workers would refuse them if it changed.
    """
    secret: ChannelSecret | None = getattr(scheduler, _SECRET, None)
    if secret is None:
        secret = ChannelSecret()
        setattr(scheduler, _SECRET, secret)
    return secret


@dataclass(slots=True)
class _HostEntry:
    key: str
    future: Future[Host]
    is_open: bool = False
    #: Facts that the Host reported about its process.
    facts: Mapping[str, Any] = field(default_factory=dict)


class HostRegistry:
    """The Hosts, one per worker, each a Dask actor that the supervisor's client holds."""

    def __init__(self, scheduler: Scheduler, reserved: ReservedResources) -> None:
        self._scheduler = scheduler
        #: Resources that replicas occupy, for the scheduler.
        self.reserved = reserved
        self._client: Client | None = None
        #: The start message of each instance; the Hosts keep them for the next scheduler.
        self.starts: dict[InstanceName, Mapping[str, Any]] = {}
        #: The secret that a process needs to open channels to the workers.
        self.secret = secret_of(scheduler)
        self._entries: dict[WorkerAddress, _HostEntry] = {}
        self._refused: dict[WorkerAddress, str] = {}
        self._failed: dict[WorkerAddress, str] = {}
        #: Workers that are being retired; they get no new actors.
        self.retiring: set[WorkerAddress] = set()
        #: Workers whose process did not answer recently; they get no new actors until it does.
        self.suspects: set[WorkerAddress] = set()
        self._tasks = TaskSet(logger)
        self._admitting: dict[WorkerAddress, asyncio.Task[bool]] = {}

    def open(self, client: Client) -> None:
        """Set the client that holds the Hosts."""
        self._client = client

    def has(self, worker: WorkerAddress) -> bool:
        return worker in self._entries and self._entries[worker].is_open

    @property
    def count(self) -> int:
        """Number of workers with an open Host."""
        return sum(entry.is_open for entry in list(self._entries.values()))

    def facts_of(self, worker: WorkerAddress) -> Mapping[str, Any]:
        """Return the facts that a worker's Host reported about its process; empty if there is no Host."""
        entry = self._entries.get(worker)
        return {} if entry is None else entry.facts

    def refused(self) -> dict[WorkerAddress, str]:
        """Return the workers without a compatible daskserve, each with the problem and its remedy."""
        return dict(self._refused)

    def infos(self, *of: WorkerAddress) -> list[dict[str, Any]]:
        """Return the fields of `daskserve.common.types.WorkerInfo` for workers with a Host; default: all."""
        head_host = get_address_host(self._scheduler.address)
        found = []
        known = self._scheduler.workers
        for address in of or known:
            worker = known.get(address)
            if worker is not None and self.has(address):
                declared = self.reserved.declared(worker)
                found.append(
                    {
                        "address": address,
                        "host": worker.host,
                        "threads": declared.threads,
                        "memory_bytes": worker.memory_limit or 0,
                        "resources": dict(declared.resources),
                        "taken_by_tasks": self.reserved.taken_by_tasks(worker),
                        "name": str(worker.name),
                        "pid": worker.pid if hasattr(worker, "pid") else 0,
                        "is_available": is_running(worker)
                        and address not in self.retiring
                        and address not in self.suspects,
                        "is_head": worker.host in (head_host, get_ip()),
                        "is_retiring": address in self.retiring,
                        "is_suspect": address in self.suspects,
                    }
                )
        return found

    async def ready(self, timeout_s: float) -> None:
        """Start a Host on every worker; return when all workers have one, or after a time limit for slow
        ones.

        Raises
        ------
        VersionMismatchError
            A worker has no daskserve, or a different version; the message names all such workers.
        InstanceError
            The cluster has no workers, or no Host started in time.
        """
        workers = list(self._scheduler.workers)
        if not workers:
            raise InstanceError(
                f"The Dask cluster at {self._scheduler.address} has no workers; add one, then start again."
            )
        self._refused = {}
        tasks = [asyncio.create_task(self.admit(worker)) for worker in workers]
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            pending: set[asyncio.Task[bool]] = set(tasks)
            while pending and not any(self.has(worker) for worker in workers):
                left_s = deadline - asyncio.get_running_loop().time()
                if left_s <= 0:
                    raise InstanceError(
                        f"No worker of {self._scheduler.address} had a free task thread for "
                        f"{shown(timeout_s)} s, which daskserve needs once per worker; wait for the running "
                        "work or add workers."
                    )
                _, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                self._raise_refused()
            if pending:
                await asyncio.wait(pending, timeout=STRAGGLER_S)
            self._raise_refused()
            if not any(self.has(worker) for worker in workers):
                raise InstanceError(
                    f"No worker could start a daskserve Host: {'; '.join(self._failed.values())}"
                )
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    def _raise_refused(self) -> None:
        if self._refused:
            raise VersionMismatchError(" ".join(self._refused.values()))

    async def admit(self, worker: WorkerAddress) -> bool:
        """Check a worker's version and start a Host on it; return whether the worker has one now."""
        task = self._admitting.get(worker)
        if task is None:
            task = asyncio.create_task(self._admit(worker), name=f"daskserve-admit-{worker}")
            self._admitting[worker] = task
            task.add_done_callback(lambda _: self._admitting.pop(worker, None))
        try:
            return await asyncio.shield(task)
        except Exception as error:
            # One failing worker must not stop the others; `ready` reports the error if no Host starts.
            self._failed[worker] = f"worker {worker}: {error!r}"
            logger.exception("Starting a Host on %s failed", worker)
            return False

    async def _admit(self, worker: WorkerAddress) -> bool:
        if self.has(worker):
            return True
        if worker in self.retiring:
            return False
        if not await self._is_compatible(worker):
            return False
        assert self._client is not None
        key = f"{HOST_KEY}{uuid.uuid4().hex}"
        future: Future[Host] = self._client.submit(
            current_host,
            actor=True,
            key=key,
            workers=[worker],
            allow_other_workers=False,
            priority=1000,
        )
        entry = self._entries[worker] = _HostEntry(key, future)
        with self._client.as_current():  # otherwise wait() uses the default client, which may be a user's
            waiting = wait(future)
        await waiting
        if future.status != "finished":
            self._entries.pop(worker, None)
            if worker in self._scheduler.workers:
                self._failed[worker] = f"worker {worker}: {await future.exception()!r}"
                logger.error("Starting a Host failed on %s", self._failed[worker])
            return False
        entry.facts = await self._execute(worker, "open", self.starts, self.secret)
        entry.is_open = self._entries.get(worker) is entry
        return entry.is_open

    async def _is_compatible(self, worker: WorkerAddress) -> bool:
        assert self._client is not None
        try:
            answers = await asyncio.wait_for(
                self._client.run(version_probe(), workers=[worker], on_error="return"), PROBE_TIMEOUT_S
            )
            answer = answers[worker]
        except (OSError, TimeoutError, KeyError) as error:
            answer = error
        if isinstance(answer, BaseException):
            if worker in self._scheduler.workers:
                self._refused[worker] = f"Worker {worker} did not answer the version check: {answer!r}."
            return False
        problem = mismatch(f"Worker {worker}", answer)
        if problem is None:
            self._refused.pop(worker, None)
            return True
        self._refused[worker] = problem
        logger.error("%s The worker gets no actors of daskserve.", problem)
        return False

    def forget(self, worker: WorkerAddress) -> None:
        """Remove a worker that left the cluster."""
        if (admitting := self._admitting.get(worker)) is not None:
            admitting.cancel()  # its Host will never start
        for known in (self._entries, self._refused, self._failed):
            known.pop(worker, None)
        self.retiring.discard(worker)
        self.suspects.discard(worker)

    async def call(self, address: ActorAddress, verb: str, **message: Any) -> Any:
        """Call a verb of an actor or of a Host; see `daskserve.cluster.protocols.base.Cluster.call`.

        Raises
        ------
        ActorLostError
            The worker or the actor is gone.
        Exception
            An error that the verb raised.
        """
        name, incarnation = address.name, address.incarnation
        answer = await self._execute(address.worker, "call", name, incarnation, verb, message)
        if "error" in answer:
            raise load_error(answer["error"])
        return answer["value"]

    async def inspect(
        self, worker: WorkerAddress, instance: InstanceName, metrics_of: Collection[str]
    ) -> Sequence[Mapping[str, Any]]:
        """Return an instance's actors on a worker, for a caller that cannot reach the worker itself."""
        async with asyncio.timeout(INSPECT_S):
            return await list_actors(self.call, worker, instance, metrics_of)

    async def entrust(self, instance: InstanceName) -> None:
        """Send the message that starts an instance to all Hosts, which keep it."""
        start = self.starts[instance]
        workers = [worker for worker in self._entries if self.has(worker)]
        # A worker that is lost during the call needs no message.
        await asyncio.gather(
            *(self._execute(worker, "entrust", instance, start) for worker in workers), return_exceptions=True
        )

    async def end_instance(self, instance: InstanceName) -> None:
        """Stop all actors of an instance on all workers; a worker that does not answer is skipped."""
        self.starts.pop(instance, None)
        workers = [worker for worker in self._entries if self.has(worker)]
        await asyncio.gather(*(self._end_on(worker, instance) for worker in workers))

    async def _end_on(self, worker: WorkerAddress, instance: InstanceName) -> None:
        try:
            await asyncio.wait_for(self._execute(worker, "end_instance", instance), END_TIMEOUT_S)
        except (OSError, TimeoutError, ServeError) as error:
            logger.warning("Ending instance %s on %s failed: %s", instance, worker, error)

    def abandon(self) -> None:
        """Break the connections to all workers, so that they wait for the next scheduler at this address."""
        for worker in list(self._entries):
            break_stream(self._scheduler, worker)

    async def release(self, worker: WorkerAddress) -> None:
        """Close the Host of a leaving worker, even while it starts, so that Dask finds no actor there."""
        admitting = self._admitting.get(worker)
        if admitting is not None:
            admitting.cancel()
            await asyncio.wait({admitting})
        entry = self._entries.get(worker)
        if entry is not None:
            await self._close_host(worker, entry)
            self._entries.pop(worker, None)

    async def restart(self, worker: WorkerAddress) -> None:
        """Make the nanny of a worker kill and restart it, in the background, unless the worker answers.

        The request may be outdated. A controller on a machine without network sees all other workers as
        unresponsive, and its requests arrive when the network is back.

        Raises
        ------
        InstanceError
            The worker has no nanny.
        UnavailableError
            The nanny does not answer, either.
        """
        known = self._scheduler.workers.get(worker)
        if known is None:
            return
        if not known.nanny:
            raise InstanceError(f"Worker {worker} cannot be restarted: it has no nanny.")
        if await _is_answered(list_actors(self.call, worker, "")):
            logger.info("Worker %s answers the scheduler and is not restarted", worker)
            return
        # Without this check, the request would arrive when the network is back, and kill a worker that serves
        # again.
        if not await _is_answered(_reach(known.nanny, self._scheduler.connection_args)):
            raise UnavailableError(f"Worker {worker} cannot be restarted: its nanny does not answer, either.")
        logger.warning("Restarting worker %s by its nanny: it does not answer", worker)
        self._tasks.spawn(
            self._scheduler.restart_workers(
                workers=[worker],
                timeout=30,
                wait_for_workers=False,
                on_error="return",
                stimulus_id="daskserve-restart-worker",
            )
        )

    async def close(self) -> None:
        """Close and release every Host."""
        for task in list(self._admitting.values()):
            task.cancel()
        await asyncio.gather(*(self._close_host(*each) for each in list(self._entries.items())))
        self._entries.clear()

    async def _close_host(self, worker: WorkerAddress, entry: _HostEntry) -> None:
        # This also removes a Host that is not open yet, because the caller that was opening it may have been
        # cancelled.
        if entry.future.status == "finished":
            try:
                await asyncio.wait_for(self._execute(worker, "close"), END_TIMEOUT_S)
            except (OSError, TimeoutError, ServeError) as error:
                logger.warning("Closing the Host on %s failed: %s", worker, error)
        entry.future.release()
        for _ in range(int(END_TIMEOUT_S / RELEASE_POLL_S)):
            if entry.key not in self._scheduler.tasks:
                break
            await asyncio.sleep(RELEASE_POLL_S)
        known: Any = self._scheduler.workers.get(worker)
        if known is not None:
            # Dask keeps counting an actor that was released while it started, and never retires its worker.
            known.actors -= {task for task in known.actors if task.key == entry.key}

    async def _execute(self, worker: WorkerAddress, function: str, *arguments: Any) -> Any:
        entry = self._entries.get(worker)
        # A controller that outlived another scheduler may call before the client exists.
        if entry is None or self._client is None:
            raise ActorLostError(f"Worker {worker} has no daskserve Host.", begun=False)
        return await call_actor(self._client, worker, entry.key, function, *arguments)


async def _reach(address: str, connection_args: Mapping[str, Any]) -> None:
    comm = await connect_comm(address, **connection_args)
    comm.abort()


async def _is_answered(asking: Awaitable[Any]) -> bool:
    """Return whether a worker answers in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            await asking
    except (OSError, TimeoutError, ServeError):
        return False
    return True
