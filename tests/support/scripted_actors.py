"""Replicas and proxies without user code and sockets, whose behaviour a `Script` defines."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from by_task import by_task

from daskserve.cluster.protocols.base import ActorContext, verb, verbs_of
from daskserve.common.types import Envelope, Load, Receive, Send, as_rank_info
from daskserve.errors import ReplicaStartError
from daskserve.options.start_messages import ProxyStart, ReplicaStart
from daskserve.telemetry.table import MetricSample

#: Durations of slow and of normal operations.
SLOW_S, QUICK_S = 3.0, 0.01


class Script:
    """The next outcomes of each backend's actors, and the faults so far.

    Attributes
    ----------
    starts, reconfigurations, stops : dict
        For each backend, the outcomes of the next operations; after these, all succeed.
    on_start : callable
        Called with the context of every replica that starts.
    sick : set of str
        Tags of replicas whose health checks fail.
    blamed : dict
        For each backend, the time of its last scripted fault.
    """

    def __init__(self) -> None:
        self.starts: dict[str, deque[str]] = defaultdict(deque)
        self.reconfigurations: dict[str, deque[str]] = defaultdict(deque)
        self.stops: dict[str, deque[str]] = defaultdict(deque)
        self.on_start: Callable[[ActorContext], None] = lambda context: None
        self.sick: set[str] = set()
        self.spoiled: set[str] = set()
        self.blamed: dict[str, float] = {}

    def next_of(self, plan: Mapping[str, deque[str]], backend: str) -> str:
        queue = plan[backend]
        return queue.popleft() if queue else "well"

    def clear(self) -> None:
        """Let all operations succeed from now on."""
        for plan in (self.starts, self.reconfigurations, self.stops):
            plan.clear()


class ScriptedReplica:
    """A replica without user code."""

    def __init__(self, script: Script, context: ActorContext) -> None:
        self._script = script
        self._clock = context.clock
        self._reconfiguring = asyncio.Lock()
        self._context = context
        self.verbs = verbs_of(self)
        self.message = ReplicaStart.decode(context.spec.payload)
        self.tag = self.message.replica_tag
        self.backend = self.message.backend_tag
        self.worker = context.worker
        self.user_config = self.message.user_config
        self.concurrency = self.message.concurrency
        self.rank_info = as_rank_info(self.message.rank_info)

    @property
    def is_reconfiguring(self) -> bool:
        """Whether the user's ``reconfigure`` runs."""
        return self._reconfiguring.locked()

    def _blame(self) -> None:
        self._script.blamed[self.backend] = self._clock.now()

    async def start(self) -> Mapping[str, Any]:
        self._script.on_start(self._context)
        outcome = self._script.next_of(self._script.starts, self.backend)
        if outcome != "well":
            self._blame()
        await self._clock.sleep(SLOW_S if outcome == "slow" else QUICK_S)
        if outcome == "fail":
            raise ReplicaStartError(f"{self.tag} is scripted to fail", user_traceback="Traceback ...")
        if outcome == "hang":
            await asyncio.Event().wait()
        return {"rank_info": self.rank_info}

    def health(self) -> dict[str, Any]:
        is_healthy = self.tag not in self._script.sick
        detail = "" if is_healthy else "its health check fails"
        return {"is_healthy": is_healthy, "detail": detail, "rank_info": self.rank_info}

    @by_task
    async def handle(self, envelope: Envelope, receive: Receive, send: Send) -> Load:
        return Load()

    def samples(self) -> list[MetricSample]:
        return []

    @verb
    async def reconfigure(
        self,
        user_config: bytes | None,
        concurrency: int,
        config: Any,
        rank_info: Sequence[int],
        patience_s: float,
    ) -> None:
        async with self._reconfiguring:
            outcome = self._script.next_of(self._script.reconfigurations, self.backend)
            if outcome != "well":
                self._blame()
                self._script.spoiled.add(self.tag)
            if outcome == "refuse":
                raise ReplicaStartError(f"{self.tag} is scripted to refuse")
            if outcome == "hang":
                await asyncio.Event().wait()
            if outcome == "slow":
                await self._clock.sleep(SLOW_S)
            self.user_config = user_config
            self.concurrency = concurrency
            self.rank_info = as_rank_info(rank_info)
            if outcome == "late":
                await self._clock.sleep(SLOW_S)
            if outcome == "half":
                raise ReplicaStartError(f"{self.tag} is scripted to fail after reconfiguring")

    async def stop(self, grace_s: float) -> None:
        outcome = self._script.next_of(self._script.stops, self.backend)
        if outcome == "hang" and grace_s:
            await asyncio.Event().wait()
        if outcome == "drain" and grace_s:
            await self._clock.sleep(min(grace_s, SLOW_S))


class ScriptedProxy:
    """A proxy that only receives the route table."""

    def __init__(self, context: ActorContext) -> None:
        self.verbs = verbs_of(self)
        self._cluster: Any = context.cluster
        self._clock = context.clock
        #: When the proxy had started.
        self.started_at = float("inf")
        self.worker = context.worker
        self.message = ProxyStart.decode(context.spec.payload)
        self.routes: Any = None
        self._has_routes = asyncio.Event()
        self._stop_watching: Callable[[], None] | None = None

    async def start(self) -> Mapping[str, Any]:
        await self._cluster.listener.start()
        self._stop_watching = self._cluster.listener.watch("routes", self._receive)
        try:
            await self._clock.wait_for(self._has_routes.wait(), 10.0)
        except TimeoutError:
            pass  # like the real proxy, it starts without routes
        self.started_at = self._clock.now()
        port = self.message.options.port
        return {"port": port, "urls": [f"http://{self.worker}:{port}"]}

    def _receive(self, routes: Any) -> None:
        self.routes = routes
        if routes is not None:
            self._has_routes.set()

    @verb
    async def wait_for_snapshot(self, epoch: int, counter: int, timeout_s: float) -> None:
        await self._cluster.listener.wait_for_snapshot((epoch, counter), timeout_s)

    @by_task
    async def handle(self, envelope: Envelope, receive: Receive, send: Send) -> Load:
        return Load()

    def samples(self) -> list[MetricSample]:
        return []

    async def stop(self, grace_s: float) -> None:
        if self._stop_watching is not None:
            self._stop_watching()
        await self._clock.sleep(min(grace_s, SLOW_S))  # its requests end
