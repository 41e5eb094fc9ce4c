"""What a `daskserve.cluster.local.cluster.LocalCluster` puts in the place of a process: its actors and its
view.

A `LocalProcess` is to the layers above what `daskserve.cluster.dask.DaskCluster` is; a `LocalHost` does for
the actors of one pretend worker what `daskserve.cluster.worker.host.Host` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

from daskserve.clock import Clock
from daskserve.cluster.base import (
    STOP_MARGIN_S,
    ActorSpec,
    Hosted,
    Store,
    StoreChange,
    TopicHandler,
    UseReport,
)
from daskserve.cluster.local.link import LocalLink
from daskserve.cluster.long_poll import LongPollClient
from daskserve.errors import (
    ActorLostError,
    BadRequestError,
    InstanceError,
    StaleEpochError,
    UnavailableError,
)
from daskserve.loops.tasks import TaskSet, is_cancelling
from daskserve.payload import dump_error, load_error
from daskserve.types import (
    ActorAddress,
    ActorKind,
    Envelope,
    EnvelopeKind,
    Load,
    Message,
    OnAnswer,
    Receive,
    Send,
    WorkerAddress,
    WorkerInfo,
)

if TYPE_CHECKING:
    from daskserve.cluster.local.cluster import LocalCluster

logger = logging.getLogger("daskserve.local")

T = TypeVar("T")


def plain_copy(value: Any) -> Any:
    """Return plain values as they come out of a channel or a topic; `TypeError` for what cannot go in."""
    return msgpack.unpackb(msgpack.packb(value), use_list=False, strict_map_key=False)


@dataclass(slots=True, eq=False)
class _Entry:
    spec: ActorSpec
    actor: Hosted
    starting: asyncio.Task[Mapping[str, Any]]

    @property
    def is_ready(self) -> bool:
        done = self.starting.done() and not self.starting.cancelled()
        return done and self.starting.exception() is None


class LocalHost:
    """The actors of one pretend worker; `daskserve.cluster.worker.host.Host` without Dask."""

    def __init__(self, info: WorkerInfo, process: LocalProcess, make_actor: Callable[..., Hosted]) -> None:
        self.info = info
        self.process = process
        self.entries: dict[str, _Entry] = {}
        self._make_actor = make_actor
        self._stopping = TaskSet(logger)
        self._carried: dict[asyncio.Task[Any], asyncio.Future[Any]] = {}

    async def carry(self, work: Callable[[], Coroutine[Any, Any, T]], caller: LocalProcess) -> T:
        """Do something for another process; it fails when this one dies, and ends when the caller does."""

        async def when_awake() -> T:
            await self.process.awake.wait()
            result = await work()
            await self.process.awake.wait()
            return result

        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(when_awake(), name=f"daskserve-local-{self.info.address}")
        self._carried[task] = outcome
        task.add_done_callback(self._settle)
        caller.outgoing.add(task)
        try:
            return await outcome
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            caller.outgoing.discard(task)

    def _settle(self, task: asyncio.Task[Any]) -> None:
        outcome = self._carried.pop(task)
        error = None if task.cancelled() else task.exception()
        if outcome.done():
            return
        if task.cancelled():
            outcome.set_exception(ActorLostError(f"An actor on {self.info.address} was stopped."))
        elif error is not None:
            outcome.set_exception(load_error(dump_error(error)))
        else:
            outcome.set_result(task.result())

    async def create(self, spec: ActorSpec) -> dict[str, Any]:
        entry = self.entries.get(spec.name)
        while entry is not None and entry.spec.incarnation < spec.incarnation:
            await self.remove(entry, 0)
            entry = self.entries.get(spec.name)
        if entry is None:
            actor = self._make_actor(spec, self)
            starting = asyncio.create_task(self._start(actor), name=f"daskserve-start-{spec.name}")
            entry = self.entries[spec.name] = _Entry(spec, actor, starting)
        elif entry.spec.incarnation > spec.incarnation:
            raise ActorLostError(
                f"{spec.name} is at incarnation {entry.spec.incarnation}; {spec.incarnation} is older."
            )
        try:
            # Shielded: a caller that gives up, or a second caller, must not end the start of the actor.
            return dict(await asyncio.shield(entry.starting))
        except asyncio.CancelledError:
            if entry.starting.cancelled() and not is_cancelling():
                raise ActorLostError(f"{spec.name} was stopped while it started.") from None
            raise
        except Exception:
            await self.remove(entry, 0)
            raise

    async def _start(self, actor: Hosted) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = plain_copy({**await actor.start(), "pid": self.info.pid})
        return facts

    async def destroy(self, address: ActorAddress, grace_s: float) -> None:
        entry = self.entries.get(address.name)
        if entry is not None and entry.spec.incarnation <= address.incarnation:
            await self.remove(entry, grace_s)

    async def remove(self, entry: _Entry, grace_s: float) -> None:
        # Shielded: who asked may go, and nobody else would end what is half ended and no entry any more.
        await asyncio.shield(self._stopping.spawn(self._stop(entry, grace_s), f"stop-{entry.spec.name}"))

    async def _stop(self, entry: _Entry, grace_s: float) -> None:
        if not entry.starting.done():
            entry.starting.cancel()
        try:
            await self.process.clock.wait_for(entry.actor.stop(grace_s), grace_s + STOP_MARGIN_S)
        finally:
            if self.entries.get(entry.spec.name) is entry:
                del self.entries[entry.spec.name]

    async def list_actors(self, *, figures_of: Collection[str] = ()) -> list[dict[str, Any]]:
        found = []
        for entry in self.entries.values():
            ask = getattr(entry.actor, "health", None)
            facts = ask() if ask is not None and entry.is_ready else {}
            count, is_wanted = getattr(entry.actor, "figures", None), entry.spec.name in figures_of
            figures = {"figures": count()} if is_wanted and count is not None and entry.is_ready else {}
            found.append(
                {
                    "name": entry.spec.name,
                    "kind": entry.spec.kind.value,
                    "incarnation": entry.spec.incarnation,
                    "is_ready": entry.is_ready,
                    "is_healthy": facts.get("is_healthy", True),
                    "detail": facts.get("detail", ""),
                    "worker": self.info.address,
                    "pid": self.info.pid,
                    **figures,
                }
            )
        return found

    async def call(self, address: ActorAddress, verb: str, message: Mapping[str, Any]) -> Any:
        actor = self.ready_actor(address)
        if verb not in actor.verbs:
            raise BadRequestError(
                f"{address.name} has no verb {verb!r}; known: {', '.join(sorted(actor.verbs))}"
            )
        return await actor.verbs[verb](**message)

    async def dispatch(self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send) -> Load:
        if envelope.kind is EnvelopeKind.CONTROL:
            head = envelope.head
            value = await self.call(address, head["verb"], head["message"])
            await send({"type": "control.result", "value": value})
            return Load()
        return await self.ready_actor(address).handle(envelope, receive, send)

    def ready_actor(self, address: ActorAddress) -> Hosted:
        entry = self.entries.get(address.name)
        if entry is None or entry.spec.incarnation != address.incarnation:
            raise ActorLostError(
                f"{address.name}/{address.incarnation} is not on {self.info.address}.", begun=False
            )
        if not entry.is_ready:
            raise UnavailableError(f"{address.name} is still starting.")
        return entry.actor

    def kill(self) -> None:
        """Be dead for everybody else, now; `bury` then frees what this process still holds."""
        self.process.die()
        self.disconnect(f"Worker {self.info.address} was lost.")

    def disconnect(self, reason: str) -> None:
        """Fail what other processes have under way here, and cancel it, as broken connections do."""
        for task, outcome in list(self._carried.items()):
            if not outcome.done():
                outcome.set_exception(ActorLostError(reason, begun=True))
            task.cancel()

    async def bury(self) -> None:
        """Stop all actors, the controller first so that it does not replace what the others stop."""
        entries = sorted(self.entries.values(), key=lambda each: each.spec.kind is not ActorKind.CONTROLLER)
        for entry in entries:
            try:
                await self.remove(entry, 0)
            except Exception:
                # One actor that cannot stop must not keep the others alive.
                logger.exception("Actor %s failed to stop", entry.spec.name)
        await self.process.close()


class _ProcessClock:
    """The cluster's clock, as a process sees it that may be suspended: what is due waits for it to go on."""

    def __init__(self, clock: Clock, awake: asyncio.Event) -> None:
        self._clock = clock
        self._awake = awake

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._clock.wall()

    async def sleep(self, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        await self._awake.wait()

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        try:
            result = await self._clock.wait_for(awaitable, timeout_s)
        except TimeoutError:
            await self._awake.wait()
            raise
        await self._awake.wait()
        return result


class LocalProcess:
    """One pretend process's view of a `LocalCluster`: a `daskserve.cluster.base.Cluster`.

    Attributes
    ----------
    clock : Clock
        The cluster's, except that nothing is due while the process is suspended.
    worker : str or None
        The address of the pretend worker this is; None for the user's program.
    shared : dict
        What the layers above keep once per process.
    link : LocalLink
        What handles and clients need of a process.
    is_alive : bool
        False once the worker was removed.
    """

    def __init__(self, cluster: LocalCluster, worker: WorkerAddress | None) -> None:
        self.instance = cluster.instance
        #: Clear while the process is suspended: it takes nothing in and gives nothing out.
        self.awake = asyncio.Event()
        self.awake.set()
        self.clock: Clock = _ProcessClock(cluster.clock, self.awake)
        self.worker = worker
        self.is_alive = True
        self.is_ended = False
        self.shared: dict[str, Any] = {}
        self.link = LocalLink(cluster, self)
        self.outgoing: set[asyncio.Task[Any]] = set()
        self._asking: set[asyncio.Task[None]] = set()
        self.store: Store = _ProcessStore(cluster, self)
        self._cluster = cluster
        self._listener: LongPollClient | None = None
        self._subscriptions: list[Callable[[], None]] = []
        #: What came in from the topic, or was to go out, while the process was suspended.
        self._held_up: list[tuple[Callable[[Any], None], Any]] = []

    def __repr__(self) -> str:
        state = "alive" if self.is_alive else "dead"
        return f"<LocalProcess {self.worker or 'program'} of {self.instance} {state}>"

    @property
    def listener(self) -> LongPollClient:
        """This process's long-poll client; made on first use, not yet started."""
        if self._listener is None:
            self._listener = LongPollClient(self, self.clock)
            self._listener.on_ended(self._mark_ended)
        return self._listener

    def _mark_ended(self) -> None:
        self.is_ended = True

    async def breathe(self) -> None:
        """Return at once while this process runs; a suspended one waits here, a dead one for ever."""
        await self.awake.wait()
        if not self.is_alive:
            await asyncio.get_running_loop().create_future()

    def suspend(self) -> None:
        """Stop in the middle of whatever it does, as a process does at SIGSTOP."""
        self.awake.clear()

    def resume(self) -> None:
        """Go on, with all that has come in meanwhile."""
        self.awake.set()
        held_up, self._held_up = self._held_up, []
        for handler, message in held_up:
            handler(message)

    def _when_awake(self, handler: Callable[[Any], None], message: Any) -> None:
        if self.awake.is_set():
            handler(message)
        else:
            self._held_up.append((handler, message))

    def die(self) -> None:
        """Take no more part in anything."""
        self.is_alive = False
        self._held_up.clear()
        self.awake.set()  # what is to be cleaned up in this process must not wait
        for unsubscribe in self._subscriptions:
            unsubscribe()
        for task in self.outgoing:
            task.cancel()

    async def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            await self._listener.stop()

    async def workers(self) -> Sequence[WorkerInfo]:
        await self.breathe()
        return self._cluster.workers()

    async def refused_workers(self) -> Mapping[WorkerAddress, str]:
        await self.breathe()
        return dict(self._cluster.refused)

    async def create(self, spec: ActorSpec, worker: WorkerAddress) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = await self._cluster.run_on(self, worker, lambda host: host.create(spec))
        return facts

    async def destroy(self, address: ActorAddress, grace_s: float) -> None:
        try:
            await self._cluster.run_on(self, address.worker, lambda host: host.destroy(address, grace_s))
        except ActorLostError:
            pass  # the worker is gone, and the actor with it

    async def call(self, address: ActorAddress, verb: str, **message: Any) -> Any:
        plain = plain_copy(message)
        return plain_copy(
            await self._cluster.run_on(self, address.worker, lambda host: host.call(address, verb, plain))
        )

    async def request(self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send) -> Load:
        return await self._cluster.run_on(
            self, address.worker, lambda host: host.dispatch(address, envelope, receive, send)
        )

    def ask(
        self, address: ActorAddress, envelope: Envelope, on_answer: OnAnswer
    ) -> Callable[[], None] | None:
        if self.is_local(address):
            return None
        messages: list[Message | None] = [None]

        async def keep(message: Message) -> None:
            messages.append(message)

        async def carry() -> None:
            outcome: Load | Exception
            try:
                outcome = await self.request(address, envelope, _nothing, keep)
            except Exception as error:  # it is for who has asked
                outcome = error
            on_answer(messages[-1], outcome)

        task = asyncio.get_running_loop().create_task(carry())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

        def give_up() -> None:
            task.cancel()

        return give_up

    async def inspect(
        self, worker: WorkerAddress, *, figures_of: Collection[str] = ()
    ) -> Sequence[Mapping[str, Any]]:
        actors: Sequence[Mapping[str, Any]] = await self._cluster.run_on(
            self, worker, lambda host: host.list_actors(figures_of=figures_of)
        )
        return actors

    async def report(self, epoch: int, report: UseReport) -> bool:
        await self.breathe()
        if epoch == self._cluster.epoch:
            self._cluster.reported = report
        return self._cluster.is_adaptive

    async def restart_worker(self, worker: WorkerAddress) -> None:
        await self.breathe()
        self._cluster.remove_worker(worker)

    async def controller(self) -> ActorAddress:
        await self.breathe()
        return await self._cluster.find_controller()

    def forget_controller(self) -> None:
        """Nothing: the controller is looked up at every call."""

    def publish(self, message: Any) -> None:
        if self.worker is None:
            raise InstanceError("Only actors publish on an instance's topic.")
        if self.is_alive:
            self._when_awake(self._cluster.topic.publish, message)

    async def subscribe(self, handler: TopicHandler) -> Callable[[], Awaitable[None]]:
        await self.breathe()
        end = self._cluster.topic.subscribe(lambda message: self._when_awake(handler, message))
        self._subscriptions.append(end)

        async def unsubscribe() -> None:
            end()

        return unsubscribe

    def is_local(self, address: ActorAddress) -> bool:
        return self.worker is not None and address.worker == self.worker


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


class _ProcessStore:
    """The instance's store as one process reaches it: fenced by epoch, and by that process's death."""

    def __init__(self, cluster: LocalCluster, process: LocalProcess) -> None:
        self._cluster = cluster
        self._process = process

    async def load(self) -> Mapping[str, bytes]:
        await self._process.breathe()
        records = await self._cluster.store.load()
        await self._process.breathe()
        return records

    def problems(self) -> Mapping[str, str]:
        return self._cluster.store.problems()

    async def commit(self, epoch: int, change: StoreChange) -> None:
        await self._process.breathe()
        if epoch < self._cluster.epoch:
            # The store would refuse it only after the new controller's first write.
            raise StaleEpochError(f"Controller epoch {epoch} was replaced by {self._cluster.epoch}.")
        await self._cluster.store.commit(epoch, change)
        await self._process.breathe()
