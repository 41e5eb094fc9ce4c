"""The listeners in the process of a replica.

The replica answers requests of its own endpoint while it has a free slot. All other requests go to the
worker, whose routers handle them like those of a proxy. So queues, their limits and the choice of a replica
stay in one place.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from daskserve.common.types import ActorRequest, BodyUse, Envelope, Receive, Send
from daskserve.errors import ActorLostError, ReplicaBusyError
from daskserve.options.start_messages import ProxyStart
from daskserve.proxies.listener import HTTPListener
from daskserve.telemetry.collector import plain_sample

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.process import Tracing

logger = logging.getLogger("daskserve.proxies")


class ReplicaRequests:
    """Passes requests to the replica of this process if it may answer them, otherwise to the worker.

    Implements `daskserve.proxies.listener.Requests`.
    """

    def __init__(
        self,
        handle: Callable[[Envelope], ActorRequest],
        slots: Any,
        to_worker: Callable[[str, Envelope], ActorRequest],
    ) -> None:
        self._handle, self._slots = handle, slots
        self._to_worker = to_worker
        self.own: frozenset[str] = frozenset()
        self.rules: Mapping[str, tuple[BodyUse, int]] = {}
        #: The number of requests of these listeners that run in the replica, and that it has started.
        self.ongoing = self.begun = 0

    @property
    def largest_body_bytes(self) -> float:
        return max((limit for _, limit in self.rules.values()), default=0)

    async def send(self, endpoint: str, envelope: Envelope, receive: Receive, send: Send) -> None:
        if self.may_answer(endpoint, envelope):
            self.ongoing += 1
            self.begun += 1
            try:
                await self._handle(envelope).respond(receive, send)
                return
            except ReplicaBusyError:
                self.begun -= 1  # it has not begun
            except ActorLostError as error:
                if error.begun:
                    raise
                self.begun -= 1
            finally:
                self.ongoing -= 1
        await self._to_worker(endpoint, replace(envelope, is_direct=False)).respond(receive, send)

    def may_answer(self, endpoint: str, envelope: Envelope) -> bool:
        """Return whether a request needs no router, and the replica has a free slot."""
        return endpoint in self.own and not envelope.model_id and self._slots.has_room

    def prepare(self, endpoint: str) -> None:
        pass

    def body_rules(self, endpoint: str, default_max_bytes: int) -> tuple[BodyUse, int] | None:
        return self.rules.get(endpoint, ("gather", default_max_bytes))

    async def wait_until_published(self, endpoint: str) -> None:
        pass

    def check_queue(self, endpoint: str) -> None:
        pass  # the worker checks it

    def is_elsewhere(self, endpoint: str) -> bool:
        return endpoint not in self.own

    def is_crowded(self, endpoint: str) -> bool:
        return endpoint in self.own and self._slots.ongoing >= self._slots.concurrency


class ReplicaListeners:
    """All listeners of one replica's process, one for each proxy of its worker."""

    def __init__(
        self,
        handle: Callable[[Envelope], ActorRequest],
        slots: Any,
        context: Any,
        *,
        to_worker: Callable[[str, Envelope], ActorRequest],
        take_files: Callable[[str], list[int]],
        trace: Callable[[Mapping[str, Any]], Tracing | None],
    ) -> None:
        self.requests = ReplicaRequests(handle, slots, to_worker)
        self._context = context
        self._take_files, self._trace = take_files, trace
        #: By the keys of the ports; see `daskserve.data.replica.process.port.Port`.
        self._listeners: dict[str, HTTPListener] = {}
        self._files: dict[str, list[int]] = {}
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def listen(self, desired: Mapping[str, Any]) -> None:
        """Open the listeners in ``desired``, and apply its routes and limits to all of them. Idempotent."""
        self.requests.own = frozenset(desired["own"])
        self.requests.rules = {each: (use, limit) for each, (use, limit) in desired["rules"].items()}
        for listener in self._listeners.values():
            self._update(listener, desired)
        async with self._lock:
            for key, start in desired["listeners"].items():
                if key not in self._listeners and not self._is_closed:
                    await self._open(key, ProxyStart.decode(start), desired)

    def _update(self, listener: HTTPListener, desired: Mapping[str, Any]) -> None:
        listener.update_routes(desired["routes"])
        listener.unready = desired.get("unready")
        listener.is_store_taken = bool(desired.get("is_store_taken"))
        if "logging" in desired:
            listener.configure_logs(desired["logging"])

    async def _open(self, key: str, start: ProxyStart, desired: Mapping[str, Any]) -> None:
        context = self._context
        name, _, _ = key.rpartition("#")
        listener = HTTPListener(
            start,
            self.requests,
            name=name,
            instance=context.spec.instance,
            clock=context.clock,
            rng=context.rng,
            logs=context.logs,
        )
        self._update(listener, desired)
        # If opening fails, the next attempt uses the same files.
        if key not in self._files:
            self._files[key] = self._take_files(key)
        await listener.bind(self._trace(start.tracing), self._files[key])
        for each in self._files.pop(key):
            os.close(each)
        self._listeners[key] = listener
        listener.start()

    async def stop(
        self, key: str, grace_s: float, *, sends_away: bool = True, gives_back: bool = False
    ) -> dict[str, Any]:
        """Close one listener, or all of them permanently if the key is empty; return their last metrics.

        For ``sends_away`` and ``gives_back``, see `daskserve.proxies.server.server.HTTPServer.drain`.
        """
        is_all = not key
        self._is_closed = self._is_closed or is_all
        async with self._lock:
            keys = [*self._listeners, *self._files] if is_all else [key]
            for each in keys:
                for unused in self._files.pop(each, ()):
                    os.close(unused)
            found = {each: self._listeners[each] for each in keys if each in self._listeners}
        # If the proxy remains, the health checks of its host must continue to succeed.
        stopping = [
            each.stop(
                grace_s,
                is_last=sends_away and not is_all,
                sends_away=sends_away,
                gives_back=gives_back,
            )
            for each in found.values()
        ]
        await asyncio.gather(*stopping)
        counted = {key: plain_samples(each) for key, each in found.items()}
        for each in found:
            self._listeners.pop(each, None)
        return counted

    def samples(self) -> dict[str, list[Any]]:
        """Return the metrics of each listener, in plain values."""
        return {key: plain_samples(each) for key, each in self._listeners.items()}


def plain_samples(listener: HTTPListener) -> list[Any]:
    """Return the metrics of a listener, in plain values."""
    return [plain_sample(each) for each in listener.samples()]
