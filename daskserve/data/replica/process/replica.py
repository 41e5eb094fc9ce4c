"""The replica in a child process, which serves its actor over a channel."""

from __future__ import annotations

import asyncio
import gc
import importlib
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from daskserve.cluster.protocols.base import ActorSpec, ContextWith, Parent, TaskRequest, verb, verbs_of
from daskserve.cluster.worker.child_view import ChildView
from daskserve.common import settings
from daskserve.common.clock import LoopClock, system_rng
from daskserve.common.types import (
    ActorKind,
    ActorRequest,
    Envelope,
    EnvelopeKind,
    Load,
    Payload,
    Receive,
    Send,
)
from daskserve.context import HasConnection, current_instance
from daskserve.data.replica.environment.kept_folders import hold
from daskserve.data.replica.environment.working_dir import archives_folder
from daskserve.data.replica.process.metrics import child_metrics
from daskserve.data.replica.replica import Replica
from daskserve.errors import UnavailableError
from daskserve.internals.otlp_exporter import post_of
from daskserve.loops.threads import StartThread
from daskserve.payload.importing import call_imported
from daskserve.payload.pickling import load_bytes
from daskserve.telemetry.logs.process import process_logs
from daskserve.telemetry.table import MetricSample
from daskserve.telemetry.tracing.enabling import enable
from daskserve.telemetry.tracing.process import disable

#: The timeout for the export of the last spans before the process ends.
LAST_SPANS_S = 1.0
#: The import path of the listeners, which belong to a higher layer; imported only by replicas that listen.
LISTENERS = "daskserve.proxies.replica_listener:ReplicaListeners"


class ChildReplica(Replica):
    """A replica that reports when the code of a cancelled request has ended."""

    consumes_tasks = False

    def __init__(self, context: ContextWith[HasConnection]) -> None:
        super().__init__(context)
        self.slots.on_free = self._note_free
        self._shared = context.cluster.shared
        #: The requests in `respond`, by number, each with a future for its end.
        self._inside: dict[int, asyncio.Future[None]] = {}
        self._left: deque[asyncio.Future[None]] = deque()

    async def respond(self, number: int, envelope: Envelope, receive: Receive, send: Send) -> Load:
        """Answer a request; its number identifies it for `ended`."""
        self._inside[number] = asyncio.get_running_loop().create_future()
        try:
            return await self.handle(envelope).respond(receive, send)
        finally:
            self._inside.pop(number).set_result(None)
            self._release()

    @verb
    async def statistics(self, has_stats: bool = False) -> dict[str, Any]:
        """Return the replica's counts, the metrics of this process, and custom autoscaling metrics."""
        stats = {"custom": self.metrics().get("custom", {})} if has_stats else {}
        stats["routing_stats"] = self._code.routing_stats()
        stats["models"] = self._code.models.facts()
        stats["multiplexed"] = self._code.models.multiplexed()
        return {
            **await super().statistics(),
            **child_metrics(self._all_samples(), self.user_samples()),
            **stats,
        }

    def _all_samples(self) -> list[MetricSample]:
        logs = process_logs.get()
        # The logs of this process count lost records separately from those of the worker.
        return [*self.samples(), *(() if logs is None else logs.samples())]

    @verb
    async def send_away(self) -> None:
        await super().send_away()

    @verb
    async def ended(self, number: int) -> None:
        """Return when a cancelled request holds no slot."""
        if number in self._inside:
            await asyncio.shield(self._inside[number])
        left = asyncio.get_running_loop().create_future()
        self._left.append(left)
        self._release()
        await left

    def _note_free(self) -> None:
        if self._left:
            # Deferred, because a request that is about to leave `respond` frees its slot first.
            asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        # Each request within `respond` holds a slot, and requests that have left hold the others. All slots
        # are equal, so the first of these requests counts as ended when a slot becomes free.
        while self._left and len(self._left) > self.load().ongoing - len(self._inside):
            left = self._left.popleft()
            if not left.done():
                left.set_result(None)


class ReplicaServer:
    """Serves one replica to its actor."""

    def __init__(self, start_thread: StartThread, parent: Parent) -> None:
        self._start_thread = start_thread
        self._parent = parent
        #: Created when the replica begins to listen.
        self._listeners: Any = None
        self._replica: ChildReplica | None = None
        self._view: ChildView | None = None
        self._own_verbs = verbs_of(self)
        self._leaves = asyncio.Event()

    def dispatch(self, name: str, number: int, envelope: Envelope) -> ActorRequest:
        """Return the handler of a verb or a request of the actor."""
        if envelope.kind is EnvelopeKind.CONTROL:
            return TaskRequest(partial(self._respond, envelope))
        return TaskRequest(partial(self._started().respond, number, envelope))

    async def _respond(self, envelope: Envelope, receive: Receive, send: Send) -> Load:
        head = envelope.head
        value = await self._run(head["verb"], envelope.payload, head["message"])
        await send({"type": "control.result", "value": value})
        return Load()

    def leave(self) -> None:
        """Let the actor replace this process, which has received SIGTERM."""
        self._leaves.set()

    @verb
    async def until_leaving(self) -> None:
        """Return when this process has received SIGTERM."""
        await self._leaves.wait()

    async def _run(self, verb: str, payload: Payload | None, message: Mapping[str, Any]) -> Any:
        if verb in self._own_verbs:
            more = {} if payload is None else {"payload": payload}
            return await self._own_verbs[verb](**message, **more)
        return await self._started().verbs[verb](**message)

    def _started(self) -> ChildReplica:
        if self._replica is None:
            raise UnavailableError("The replica has not been started.")
        return self._replica

    @verb
    async def start(
        self,
        payload: Payload,
        name: str,
        incarnation: int,
        instance: str,
        worker: str,
        access: bytes,
    ) -> Mapping[str, Any]:
        """Create the replica from its start message, start it, and return its facts."""
        view = self._view = ChildView(instance, load_bytes(access), payload.buffers)
        spec = ActorSpec(ActorKind.REPLICA, name, incarnation, instance, bytes(payload.data))
        # User code only uses the parts of the view that handles and clients need.
        context = ContextWith(
            spec,
            view,
            LoopClock(),
            system_rng(),
            worker,
            start_thread=self._start_thread,
            logs=process_logs.get(),
        )
        environments = settings.process().environments
        archives_folder.set(environments)
        prefix = Path(sys.prefix)
        if prefix.parent == environments:
            hold(prefix)
        self._replica = ChildReplica(context)
        self._context = context
        view.answer_get_worker()
        return await self._replica.start()

    @verb
    async def listen(self, wanted: Mapping[str, Any]) -> None:
        """Accept connections; see `daskserve.data.replica.process.listening`."""
        if self._listeners is None:
            if not wanted["listeners"]:
                return
            module, _, name = LISTENERS.partition(":")
            make = getattr(await asyncio.to_thread(importlib.import_module, module), name)
            replica = self._started()
            context, parent = self._context, self._parent
            self._listeners = make(
                replica.handle,
                replica.slots,
                context,
                to_worker=parent.request,
                take_files=parent.take_files,
                trace=lambda options: enable(context, options, call_imported, post_of),
            )
        current_instance.set(self._context.spec.instance)  # for the log records of the listeners' tasks
        await self._listeners.listen(wanted)

    @verb
    async def stop_listening(
        self, key: str, grace_s: float, sends_away: bool = True, gives_back: bool = False
    ) -> dict[str, Any]:
        """Close a port, or all, wait for the requests of its connections, and return the last metrics."""
        if self._listeners is None:
            return {}
        found: dict[str, Any] = await self._listeners.stop(
            key, grace_s, sends_away=sends_away, gives_back=gives_back
        )
        return found

    @verb
    async def statistics(self, **message: Any) -> dict[str, Any]:
        """Return the replica's counts and metrics, and those of its listeners."""
        found: dict[str, Any] = await self._started().statistics(**message)
        if self._listeners is not None:
            found["listeners"] = self._listeners.samples()
            requests = self._listeners.requests
            found["direct"] = requests.ongoing, requests.begun - requests.ongoing
        return found

    @verb
    async def stop(self, grace_s: float, is_planned: bool) -> None:
        """Stop the replica, and close its view of the cluster."""
        await self.stop_listening("", 0)
        if self._replica is not None:
            await self._replica.end(grace_s, is_planned=is_planned)
            gc.collect()  # objects in reference cycles may have destructors, and the process ends next
        if self._view is not None:
            await asyncio.to_thread(disable, self._view.shared, LAST_SPANS_S)
            await asyncio.to_thread(self._view.close)


def served_replica(
    start_thread: StartThread, parent: Parent
) -> tuple[Callable[[str, int, Envelope], ActorRequest], Callable[[], None]]:
    """Return the functions that serve one replica; a `daskserve.cluster.worker.child_main.Factory`."""
    server = ReplicaServer(start_thread, parent)
    return server.dispatch, server.leave
