"""Process isolation: a replica whose user code runs in a child process, with an interpreter of its own.

The replica's actor stays in its worker and keeps the one book of requests; the child runs a `Replica` as any
worker would, wall, batches and all, behind a `daskserve.cluster.worker.child.ChildProcess`. What this adds is
the way between them: requests and verbs go over, and when the child is gone, so is the replica.

A slot is taken before a request is sent to the child and free when the child's answer is complete. For a
request that was given up there is no answer to wait for, so the child is asked when its code has ended
(`ended`); only then another request may take its place. So the child never has more to do than it has slots.

Errors of user code may be of classes that the worker does not have. They cross packed, as a message
(`PACKED`), and the actor passes them on unread.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from daskserve import settings
from daskserve.clock import LoopClock, stopwatch, system_rng
from daskserve.cluster.base import ActorContext, ActorSpec, verb, verbs_of
from daskserve.cluster.worker.child import ChildProcess, ChildView, dump_access
from daskserve.data.replica.autoscaling_stats import ChildStats
from daskserve.data.replica.child_figures import Told, keep_asking_for_figures, tell
from daskserve.data.replica.health import HealthWatch
from daskserve.data.replica.replica import CLOSE_GRACE_S, Replica
from daskserve.data.replica.slots import SlotHolder
from daskserve.errors import (
    ActorLostError,
    BadRequestError,
    ReplicaBusyError,
    ReplicaStartError,
    RequestTimeoutError,
    ServeError,
    UnavailableError,
)
from daskserve.figures.replica import ReplicaFigures
from daskserve.figures.table import MetricSample
from daskserve.figures.user import UserSample
from daskserve.options.environment import find_interpreter
from daskserve.payload import PackedError, dump_error
from daskserve.starts import ReplicaStart
from daskserve.types import ActorKind, Envelope, EnvelopeKind, Load, Message, Payload, Receive, Send

logger = logging.getLogger("daskserve.replica")

#: The type of the message that carries an error of user code out of the child.
PACKED = "daskserve.error"
#: What the child serves.
FACTORY = f"{__name__}:ReplicaServer"
#: The actor probes its child; the child need not probe itself.
NEVER_S = 1e9


# ---- in the worker


class IsolatedReplica(SlotHolder):
    """The `daskserve.cluster.base.Hosted` whose user code runs in a child process.

    A child that ends unasked shows in `health`, which whoever watches the worker reads every second.
    """

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self.verbs = verbs_of(self)
        self._start = start = ReplicaStart.decode(context.spec.payload)
        super().__init__(start.concurrency)
        self._child: ChildProcess | None = None
        #: Why the replica cannot serve any more, if its child ended unasked.
        self._loss = ""
        self._queued = 0
        self._handled = 0
        self._figures = ReplicaFigures()
        self._labels = (context.spec.instance, start.backend_tag, start.replica_tag)
        #: What the child said of its figures last, and what keeps asking it.
        self._told = Told()
        #: Returns what autoscaling asks for every second.
        self._stats = ChildStats(context.clock)
        self.figures = lambda: self._told.brief(self._ongoing, self._handled) | self._stats.figures()
        self._asking: asyncio.Task[None] | None = None
        self._settling: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._health = HealthWatch(
            start.replica_tag,
            self.probe,
            context.clock,
            period_s=start.health_period_s,
            timeout_s=start.health_timeout_s,
            threshold=start.health_threshold,
        )

    def __repr__(self) -> str:
        state = "lost" if self._loss else "open" if self._is_open else "closed"
        tag = self._start.replica_tag
        return f"<IsolatedReplica {tag} {state} {self._ongoing}/{self._concurrency} {self._child}>"

    # ---- start

    async def start(self) -> Mapping[str, Any]:
        """Start the child, have it load and construct the user's code, and return facts about both.

        Raises
        ------
        BadRequestError
            The backend's Python environment does not exist on this worker.
        VersionMismatchError, InstanceError
            Its interpreter has no fitting daskserve, or does not run.
        ReplicaStartError
            The user's code failed, with the traceback, or ended its process.
        """
        start = self._start
        began = stopwatch()
        interpreter = find_interpreter(start.environment, settings.process_variables())
        try:
            child = await ChildProcess.start(start.replica_tag, interpreter, FACTORY)
            self._child = child
            child.on_end = self._note_end
            facts = await self._start_child(child)
        except BaseException as error:
            self._figures.start_failures += isinstance(error, Exception)
            await self._end()
            raise
        self._is_open = True
        self._health.start()
        self._figures.record_start(stopwatch() - began, self._context.clock.wall())
        keep_asking = keep_asking_for_figures(self.statistics, start.replica_tag, self._context.clock)
        self._asking = asyncio.create_task(keep_asking, name=f"daskserve-figures-{start.replica_tag}")
        return {**facts, "child_pid": child.pid}

    async def _start_child(self, child: ChildProcess) -> Mapping[str, Any]:
        spec = self._context.spec
        try:
            facts: Mapping[str, Any] = await child.call(
                "start",
                replace(self._start, health_period_s=NEVER_S).encode(),
                name=spec.name,
                incarnation=spec.incarnation,
                instance=spec.instance,
                worker=self._context.worker,
                access=dump_access(self._context.cluster),
            )
        except ActorLostError:
            await child.ended.wait()
            raise ReplicaStartError(
                f"Backend {self._start.backend_tag!r} did not survive its start: its process {child.fate}."
            ) from None
        return facts

    # ---- requests

    async def handle(self, envelope: Envelope, receive: Receive, send: Send) -> Load:
        """Have the child answer one request.

        Raises
        ------
        ReplicaBusyError
            All slots are taken, for longer than the request has patience; it has not begun.
        ActorLostError
            The replica is stopping or its process has ended; ``begun`` says if it may have seen the request.
        PackedError
            What user code raised.
        """
        child = self._running()
        if envelope.kind is EnvelopeKind.CONTROL:
            raise BadRequestError(f"A replica takes no requests of kind {envelope.kind!r}.")
        if self._ongoing >= self._concurrency or envelope.patience is not None:
            await self._take_slot(envelope, send)
            envelope = replace(envelope, patience=None)  # the child has a slot for it
        else:
            self._ongoing += 1
        self._handled += 1
        number = self._handled
        passage = _Passage(send)
        try:
            load = await child.request(number, envelope, receive, passage.send)
        except ActorLostError as error:
            self.free_slot()
            raise await self._lost(child, error) from None
        except BaseException as error:
            # A request that the child gave up at its deadline may have left code that runs on, too.
            if passage.is_broken or isinstance(error, (asyncio.CancelledError, RequestTimeoutError)):
                self._free_slot_later(child, number)
            else:
                self.free_slot()
            raise
        self.free_slot()
        self._queued = load.queued
        if passage.packed is not None:
            raise PackedError(passage.packed)
        return self.load()

    def load(self) -> Load:
        """Return how many requests run, and how many wait: for a batch, at the last answer, or for a slot."""
        return Load(self._ongoing, min(self._queued, self._ongoing) + len(self._line.places))

    def _refusal(self) -> ReplicaBusyError:
        return self._figures.refusal(self._start.replica_tag, self._ongoing)

    def _free_slot_later(self, child: ChildProcess, number: int) -> None:
        task = asyncio.create_task(self._settle(child, number), name="daskserve-isolation-settle")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, child: ChildProcess, number: int) -> None:
        try:
            await child.call("ended", number=number)
        except ServeError:
            pass  # the child is gone, and the request with it
        finally:
            self.free_slot()

    async def _lost(self, child: ChildProcess, error: ActorLostError) -> ActorLostError:
        """Return what to tell whoever waited: what became of the child, if that is why they wait in vain."""
        if child.is_open:
            return error
        await child.ended.wait()
        loss = self._loss or f"Replica {self._start.replica_tag!r} was stopped."
        return ActorLostError(loss, begun=error.begun)

    # ---- verbs

    @verb
    async def reconfigure(self, user_config: bytes | None, concurrency: int, **options: Any) -> None:
        """Take over changed options without a restart; see
        `daskserve.data.replica.replica.Replica.reconfigure`.
        """
        await self._call("reconfigure", user_config=user_config, concurrency=concurrency, **options)
        self._set_concurrency(concurrency)

    @verb
    async def statistics(self) -> dict[str, Any]:
        """Return the replica's figures; those that end in ``_total`` only grow."""
        found = await self._ask(self._running())
        own = {"ongoing": self._ongoing, "concurrency": self._concurrency}
        own["queued"] = found["queued"] + len(self._line.places)
        return {**found, **own, "refused_total": found["refused_total"] + self._figures.refused}

    async def _ask(self, child: ChildProcess) -> dict[str, Any]:
        """Return what the child counts, and keep the rest of what it tells."""
        try:
            found: dict[str, Any] = await child.call("statistics", has_stats=self._stats.is_wanted)
        except ActorLostError as error:
            raise await self._lost(child, error) from None
        self._stats.told(found.pop("custom", {}))
        self._told = Told(found.pop("samples"), found.pop("user_samples"), found["latency_counts"])
        return found

    def samples(self) -> list[MetricSample]:
        """Return the replica's figures as metrics, those of the child as it told them last."""
        own = self._figures.samples(self._labels) + self._figures.states(
            self._labels,
            load=Load(self._ongoing, len(self._line.places)),  # what waits for batches is told by the child
            concurrency=self._concurrency,
            abandoned=0,
            loop_blocks=0,
            probe_failures=self._health.failures_total,
            is_healthy=self._health.is_healthy and not self._loss,
        )
        childs = self._told.samples()
        both = {("deployment_rejections", self._labels[:2]), ("replica_queued_requests", self._labels)}
        known = {(name, labels) for name, labels, _ in childs} - both
        return childs + [sample for sample in own if sample[:2] not in known]

    def user_samples(self) -> list[UserSample]:
        """Return what user code measures, as the child told it last; see `daskserve.metrics`."""
        return self._told.user_samples()

    @verb
    async def probe(self) -> None:
        """Return if user code can run and does not object; see
        `daskserve.data.replica.replica.Replica.probe`.

        It fails at once when the child has ended.
        """
        await self._call("probe")

    def health(self) -> dict[str, Any]:
        """Return what the replica's own probes found, in plain values; one without its child is not well."""
        facts = self._health.facts()
        return {**facts, "is_healthy": False, "detail": self._loss} if self._loss else facts

    async def _call(self, verb: str, **message: Any) -> Any:
        child = self._running()
        try:
            return await child.call(verb, **message)
        except ActorLostError as error:
            raise await self._lost(child, error) from None

    def _running(self) -> ChildProcess:
        if not self._is_open or self._child is None:
            raise self._not_running()
        return self._child

    def _not_running(self) -> ActorLostError:
        return ActorLostError(
            self._loss or f"Replica {self._start.replica_tag!r} is not running.", begun=False
        )

    def _note_end(self) -> None:
        if not self._is_open or self._child is None:
            return
        self._loss = f"Replica {self._start.replica_tag!r} is lost: its process {self._child.fate}."
        self._close()
        logger.error("%s", self._loss)

    # ---- stop

    async def stop(self, grace_s: float) -> None:
        """End: refuse requests, let the running ones finish for ``grace_s``, cancel the rest, destruct.

        When this returns, the child and all that it started have ended.
        """
        child = self._child if self._is_open and grace_s > 0 else None
        self._close()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await self._health.stop()
        if child is not None:
            await self._send_away(child)
        try:
            await self._context.clock.wait_for(self._wait_until_idle(), grace_s)
        except TimeoutError:
            logger.info("%r cancels what still runs after %s s", self, grace_s)
        if child is not None and child.is_open:
            try:
                await self._context.clock.wait_for(self._ask(child), CLOSE_GRACE_S)
            except (ActorLostError, TimeoutError):
                pass  # what it counted in its last second is lost with it
        await self._end()

    async def _send_away(self, child: ChildProcess) -> None:
        try:
            await self._context.clock.wait_for(child.call("send_away"), CLOSE_GRACE_S)
        except (ActorLostError, TimeoutError):
            pass  # it has ended already, or has other troubles

    async def _end(self) -> None:
        # One task whoever asks, so that a stop() that is cancelled leaves no process behind.
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._tear_down())
        await asyncio.shield(self._ending)

    async def _tear_down(self) -> None:
        child = self._child
        if child is None:
            return
        try:
            await self._context.clock.wait_for(child.call("stop"), CLOSE_GRACE_S)
        except TimeoutError:
            logger.warning("%r is killed: its user code does not end", self)
            child.kill()
        except ActorLostError:
            pass  # it has ended already
        await child.end()
        if self._settling:
            await asyncio.wait(self._settling)


class _Passage:
    """The way out of the child for one request: passes messages on and keeps the error among them."""

    __slots__ = ("_send", "is_broken", "packed")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.packed: bytes | None = None
        #: Whether the caller failed to take a message; the child has been told to stop then.
        self.is_broken = False

    async def send(self, message: Message) -> None:
        if message["type"] == PACKED:
            self.packed = message["error"]
            return
        try:
            await self._send(message)
        except BaseException:
            self.is_broken = True
            raise


# ---- in the child


class ChildReplica(Replica):
    """A replica that can tell when the code of a request that was given up has ended."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        #: The requests within `handle`, each with what is to be told when it leaves.
        self._inside: dict[int, asyncio.Future[None]] = {}
        self._left: deque[asyncio.Future[None]] = deque()

    async def answer(self, number: int, envelope: Envelope, receive: Receive, send: Send) -> Load:
        """Answer a request, which `ended` knows by its number."""
        self._inside[number] = asyncio.get_running_loop().create_future()
        try:
            return await self.handle(envelope, receive, send)
        finally:
            self._inside.pop(number).set_result(None)
            self._release()

    async def statistics(self, has_stats: bool = False) -> dict[str, Any]:
        """Return the replica's figures, all that a scrape of this process would find, and the stats."""
        stats = {"custom": self.figures().get("custom", {})} if has_stats else {}
        return {**await super().statistics(), **tell(self.samples(), self.user_samples()), **stats}

    async def ended(self, number: int) -> None:
        """Return when a cancelled request holds no slot any more, or never held one."""
        if number in self._inside:
            await asyncio.shield(self._inside[number])
        left = asyncio.get_running_loop().create_future()
        self._left.append(left)
        self._release()
        await left

    def free_slot(self) -> None:
        super().free_slot()
        if self._left:
            # Not at once: a request that is about to leave `handle` lets go of its slot first.
            asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        # A request within `handle` holds a slot, so all other slots are held by requests that have left.
        # Which of them lets go of one does not matter: slots are all alike.
        while self._left and len(self._left) > self.load().ongoing - len(self._inside):
            left = self._left.popleft()
            if not left.done():
                left.set_result(None)


class ReplicaServer:
    """Serves one replica to its actor; a `daskserve.cluster.worker.child.Served`."""

    def __init__(self) -> None:
        self._replica: ChildReplica | None = None
        self._view: ChildView | None = None
        self._verbs: Mapping[str, Callable[..., Awaitable[Any]]] = {"start": self._start, "stop": self._stop}

    async def dispatch(
        self, name: str, number: int, envelope: Envelope, receive: Receive, send: Send
    ) -> Load:
        """Answer a verb or a request of the actor."""
        if envelope.kind is EnvelopeKind.CONTROL:
            head = envelope.head
            value = await self._run(head["verb"], envelope.payload, head["message"])
            await send({"type": "control.result", "value": value})
            return Load()
        replica = self._started()
        try:
            return await replica.answer(number, envelope, receive, send)
        except Exception as error:
            if type(error).__module__ == ServeError.__module__:
                raise
            # Packed here, to be raised where it is wanted.
            await send({"type": PACKED, "error": dump_error(error)})
            return replica.load()

    async def _run(self, verb: str, payload: Payload | None, message: Mapping[str, Any]) -> Any:
        if verb in self._verbs:
            more = {} if payload is None else {"payload": payload.data}
            return await self._verbs[verb](**message, **more)
        return await getattr(self._started(), verb)(**message)

    def _started(self) -> ChildReplica:
        if self._replica is None:
            raise UnavailableError("The replica has not been started.")
        return self._replica

    async def _start(
        self, payload: bytes, name: str, incarnation: int, instance: str, worker: str, access: bytes
    ) -> Mapping[str, Any]:
        view = self._view = ChildView(instance, access, settings.timeouts().connect_s)
        spec = ActorSpec(ActorKind.REPLICA, name, incarnation, instance, bytes(payload))
        # User code sees of the view only what handles and clients need of it.
        context = ActorContext(spec, view, LoopClock(), system_rng(), worker)  # type: ignore[arg-type]
        self._replica = ChildReplica(context)
        return await self._replica.start()

    async def _stop(self) -> None:
        if self._replica is not None:
            await self._replica.stop(0)
            gc.collect()  # what only a cycle holds has a destructor, too, and this was its last chance
        if self._view is not None:
            await asyncio.to_thread(self._view.close)
