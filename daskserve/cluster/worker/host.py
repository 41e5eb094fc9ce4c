"""The Host: the one Dask actor of a worker, in which daskserve's own actors live.

Problem: an actor made by ``submit`` waits for a free task thread, which takes as long as the batch work
there. Choice: submit one Host per worker, once, and make controller, proxies and replicas inside it by an
asynchronous call, which takes milliseconds on a worker whose threads are all busy.

The Host knows its actors only as `Hosted`. It also owns what a process needs once: the Dask client, the
channels, and one `DaskCluster` per instance. All of it hangs on this object, nothing on a module: test
clusters run several workers in one process.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, get_worker
from distributed.core import Status

from daskserve._version import __version__
from daskserve.cluster.base import STOP_MARGIN_S, ActorContext, ActorFactory, ActorSpec, Hosted
from daskserve.cluster.channel.dialling import CHANNEL_OP
from daskserve.cluster.dask import HOST_ACTOR
from daskserve.cluster.distributed_internals import as_current_worker
from daskserve.cluster.encryption import as_client
from daskserve.cluster.link import Link
from daskserve.cluster.metrics_path import facts_of_server
from daskserve.cluster.worker.interpreter import InterpreterTuning
from daskserve.errors import ActorLostError, BadRequestError, UnavailableError
from daskserve.figures.collector import PROCESS
from daskserve.loops.tasks import TaskSet, is_cancelling
from daskserve.payload import dump_error
from daskserve.types import (
    ACTOR_FACTORIES,
    ActorKind,
    Envelope,
    EnvelopeKind,
    InstanceName,
    Load,
    OnAnswer,
    Receive,
    Send,
)

logger = logging.getLogger("daskserve.host")


@dataclass(slots=True)
class _Entry:
    spec: ActorSpec
    actor: Hosted
    starting: asyncio.Task[Mapping[str, Any]]
    ongoing: set[asyncio.Task[Any]] = field(default_factory=set)
    #: What answers requests without a task, if the actor has such a thing, as replicas do.
    answer: Callable[[Envelope, OnAnswer], Callable[[], None] | None] | None = None
    was_ready: bool = False  # somebody has seen that it is; it stays so

    @property
    def is_ready(self) -> bool:
        if not self.was_ready:
            done = self.starting.done() and not self.starting.cancelled()
            self.was_ready = done and self.starting.exception() is None
        return self.was_ready

    def health(self) -> dict[str, Any]:
        """Return what the actor says of its health; one that has nothing to say of it is healthy."""
        ask = getattr(self.actor, "health", None)
        facts = ask() if ask is not None and self.is_ready else {}
        return {"is_healthy": facts.get("is_healthy", True), "detail": facts.get("detail", "")}

    def figures(self) -> dict[str, Any]:
        """Return the actor's figures, for one that has any."""
        ask = getattr(self.actor, "figures", None)
        return {"figures": ask()} if ask is not None and self.is_ready else {}


def load_factory(kind: ActorKind) -> ActorFactory:
    """Import the class that makes actors of a kind."""
    module, _, name = ACTOR_FACTORIES[kind].partition(":")
    factory: ActorFactory = getattr(importlib.import_module(module), name)
    return factory


class Host:
    """One per worker. Every method is ``async``: plain ones would share Dask's single actor thread."""

    def __init__(self) -> None:
        self._worker = get_worker()
        self._tuning = InterpreterTuning()
        #: The link of this worker's process; None until `open`.
        self.link: Link | None = None
        self._entries: dict[str, _Entry] = {}
        self._stopping = TaskSet(logger)
        # Here, in a task thread, imports do not hold up the event loop; a deploy then finds them done.
        self._factories = {kind: load_factory(kind) for kind in ActorKind}
        self._verbs: dict[str, Callable[..., Awaitable[Any]]] = {
            "create": self._create,
            "destroy": self._destroy,
            "actors": self._list_actors,
        }

    async def open(self) -> dict[str, Any]:
        """Connect to the scheduler and start answering channels; idempotent."""
        if self.link is None:
            client = Client(
                self._worker.scheduler.address,
                asynchronous=True,
                set_as_default=False,
                security=as_client(self._worker.security, "worker"),
                direct_to_workers=True,
                name="daskserve-host",
            )
            self.link = Link(
                client, role="worker", worker=self._worker, dispatch=self.dispatch, answer=self.answer
            )
            # All that `close` takes back is done before the first wait, during which it may be called.
            self._worker.handlers[CHANNEL_OP] = self._accept
            self._tuning.open()
            await client
        return {"pid": os.getpid(), "version": __version__, **facts_of_server(self._worker)}

    async def _accept(self, comm: Any, by_socket: bool) -> Any:
        await self._open_link.channels.accept(comm, by_socket=by_socket)
        return Status.dont_reply

    @property
    def _open_link(self) -> Link:
        if self.link is None:
            raise UnavailableError(f"The Host on {self._worker.address} is not open.")
        return self.link

    async def run(self, verb: str, message: dict[str, Any]) -> dict[str, Any]:
        """Answer a verb for the supervisor, errors packed as bytes because foreign ones may not unpickle."""
        try:
            if verb == "call":
                return {"value": await self._call(**message)}
            if verb == "end_instance":
                await self._end_instance(**message)
                return {"value": None}
            return {"value": await self._verbs[verb](**message)}
        except Exception as error:
            # Every error goes back to the caller, who raises it.
            return {"error": dump_error(error)}

    async def close(self) -> None:
        """Stop all actors and leave nothing of daskserve in the worker."""
        for instance in {entry.spec.instance for entry in self._entries.values()}:
            await self._end_instance(instance=instance)
        self._worker.handlers.pop(CHANNEL_OP, None)
        self._tuning.close()
        if self.link is not None:
            link, self.link = self.link, None
            await link.close()
            await link.client.close()

    def dispatch(
        self, name: str, incarnation: int, envelope: Envelope, receive: Receive, send: Send
    ) -> Coroutine[Any, Any, Load]:
        """Answer one request stream: of the Host itself, a control call, or a request to an actor."""
        if envelope.kind is EnvelopeKind.CONTROL:
            return self._control(name, incarnation, envelope, send)
        entry = self._entries.get(name)
        if entry is None or not entry.was_ready or entry.spec.incarnation != incarnation:
            return self._ready_actor(name, incarnation).handle(envelope, receive, send)
        return entry.actor.handle(envelope, receive, send)

    def answer(
        self, name: str, incarnation: int, envelope: Envelope, on_answer: OnAnswer
    ) -> Callable[[], None] | None:
        """Have an actor answer a request without a task; None if it does not, for whatever reason."""
        entry = self._entries.get(name)
        if entry is None or not entry.was_ready or entry.spec.incarnation != incarnation:
            return None
        return None if entry.answer is None else entry.answer(envelope, on_answer)

    async def _control(self, name: str, incarnation: int, envelope: Envelope, send: Send) -> Load:
        verb, message = envelope.head["verb"], dict(envelope.head["message"])
        if name == HOST_ACTOR:
            value = await self._verbs[verb](**message)
        else:
            value = await self._call(name, incarnation, verb, message)
        await send({"type": "control.result", "value": value})
        return Load()

    async def _create(self, spec: dict[str, Any]) -> dict[str, Any]:
        wanted = ActorSpec(**{**spec, "kind": ActorKind(spec["kind"])})
        entry = self._entries.get(wanted.name)
        while entry is not None and entry.spec.incarnation < wanted.incarnation:
            await self._remove(entry, grace_s=0)
            entry = self._entries.get(wanted.name)  # another caller may have been quicker
        if entry is None:
            entry = self._make(wanted)
        elif entry.spec.incarnation > wanted.incarnation:
            raise ActorLostError(
                f"{wanted.name} is at incarnation {entry.spec.incarnation}; {wanted.incarnation} is older."
            )
        # Shielded: a caller that gives up, or a second caller, must not end the start of the actor.
        try:
            return dict(await asyncio.shield(entry.starting))
        except asyncio.CancelledError:
            if entry.starting.cancelled() and not is_cancelling():
                raise ActorLostError(f"{wanted.name} was stopped while it started.") from None
            raise
        except Exception:
            await self._remove(entry, grace_s=0)
            raise

    def _make(self, spec: ActorSpec) -> _Entry:
        link = self._open_link
        cluster = link.cluster(spec.instance)
        context = ActorContext(spec, cluster, link.clock, link.rng, self._worker.address, link.landing)
        # User code reached from here finds this worker by Dask's own get_worker() and get_client().
        with as_current_worker(self._worker):
            actor = self._factories[spec.kind](context)
            starting = asyncio.create_task(self._start(actor), name=f"daskserve-start-{spec.name}")
        entry = _Entry(spec, actor, starting, answer=getattr(actor, "answer_straight", None))
        self._entries[spec.name] = entry
        PROCESS.add(actor)
        return entry

    async def _start(self, actor: Hosted) -> Mapping[str, Any]:
        try:
            return {**await actor.start(), "pid": os.getpid()}
        finally:
            self._tuning.objects_changed()

    async def _destroy(self, name: str, incarnation: int, grace_s: float) -> None:
        entry = self._entries.get(name)
        if entry is not None and entry.spec.incarnation <= incarnation:
            await self._remove(entry, grace_s)

    async def _remove(self, entry: _Entry, grace_s: float) -> None:
        # Shielded: who asked may go, as a controller that is killed. Nobody else would end what is half ended
        # and no entry any more.
        await asyncio.shield(self._stopping.spawn(self._stop(entry, grace_s), f"stop-{entry.spec.name}"))

    async def _stop(self, entry: _Entry, grace_s: float) -> None:
        if not entry.starting.done():
            entry.starting.cancel()
        try:
            await self._open_link.clock.wait_for(entry.actor.stop(grace_s), grace_s + STOP_MARGIN_S)
        finally:
            if self._entries.get(entry.spec.name) is entry:
                del self._entries[entry.spec.name]
            PROCESS.remove(entry.actor)
            self._tuning.objects_changed()

    async def _list_actors(
        self, instance: InstanceName, figures_of: Collection[str] = ()
    ) -> list[dict[str, Any]]:
        named = set(figures_of)
        return [
            {
                "name": entry.spec.name,
                "kind": entry.spec.kind.value,
                "incarnation": entry.spec.incarnation,
                "is_ready": entry.is_ready,
                **entry.health(),
                **(entry.figures() if entry.spec.name in named else {}),
                "worker": self._worker.address,
                "pid": os.getpid(),
            }
            for entry in self._entries.values()
            if entry.spec.instance == instance
        ]

    async def _end_instance(self, instance: InstanceName) -> None:
        mine = [entry for entry in self._entries.values() if entry.spec.instance == instance]
        # The controller first, so that it does not replace what the others stop.
        mine.sort(key=lambda entry: entry.spec.kind is not ActorKind.CONTROLLER)
        for entry in mine:
            try:
                await self._remove(entry, grace_s=0)
            except Exception:
                # One actor that cannot stop must not keep the others alive.
                logger.exception("Actor %s failed to stop", entry.spec.name)
        await self._open_link.drop_cluster(instance)
        PROCESS.forget(instance)

    async def _call(self, name: str, incarnation: int, verb: str, message: dict[str, Any]) -> Any:
        actor = self._ready_actor(name, incarnation)
        if verb not in actor.verbs:
            raise BadRequestError(f"{name} has no verb {verb!r}; known: {', '.join(sorted(actor.verbs))}")
        return await actor.verbs[verb](**message)

    def _ready_actor(self, name: str, incarnation: int) -> Hosted:
        entry = self._entries.get(name)
        if entry is None or entry.spec.incarnation != incarnation:
            raise ActorLostError(f"{name}/{incarnation} is not on {self._worker.address}.", begun=False)
        if not entry.is_ready:
            raise UnavailableError(f"{name} is still starting.")
        return entry.actor
