"""Child processes that listen: each accepts connections of the port of the proxies of its worker.

The proxies of a worker say here on which ports they listen, and what they know: routes, and the rules of
bodies. Each child that has started gets all of it, and again after each change. One task for each child
compares what it has with what it should have, so a child that blocks delays itself only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from daskserve.cluster.protocols.base import Process, TaskRequest
from daskserve.common.types import ActorRequest, Envelope, Load, Receive, Send
from daskserve.errors import ActorLostError
from daskserve.loops.tasks import TaskSet
from daskserve.telemetry.error_log import ErrorLog

logger = logging.getLogger("daskserve.replica")

#: The key of the `ListeningChildren` among what the parts of an instance share in a process.
KEY = "listening_children"
#: How long a child that does not listen as it should is left alone before the next attempt.
RETRY_S = 1.0
#: Time beyond the grace period for a child to say that it has closed a port.
ANSWER_S = 1.0

CallChild = Callable[..., Awaitable[Any]]


def answers_itself(endpoint: Mapping[str, Any] | None, backend: Mapping[str, Any] | None, tag: str) -> bool:
    """Return whether a replica of a backend may answer any request of an endpoint.

    Other requests need a router: to draw a backend or a version, to send copies, or because an option of the
    backend chooses among replicas or orders requests.
    """
    if not endpoint or not backend:
        return False
    traffic = [each for each, weight in endpoint["traffic"].items() if weight > 0]
    if traffic != [tag] or endpoint["shadows"]:
        return False
    return not any(backend.get(each) for each in ("router", "order", "hedging", "rollout"))


class ListeningChild:
    """One child: what it was told last, and the task that tells it."""

    def __init__(self, tag: str, call: CallChild, cluster: Process) -> None:
        self.tag = tag
        self._call, self._cluster = call, cluster
        self._wanted: Mapping[str, Any] | None = None
        #: Whether it may listen.
        self.was_told = False
        self._changed, self.told = asyncio.Event(), asyncio.Event()
        self.told.set()

    def tell(self, wanted: Mapping[str, Any]) -> None:
        """Note what the child should have."""
        self._wanted = wanted
        self.was_told = True
        self.told.clear()
        self._changed.set()

    async def run(self) -> None:
        """Tell the child each change until it ends."""
        errors = ErrorLog(logger)
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted
            try:
                await self._call("listen", wanted=wanted)
            except ActorLostError:
                self.told.set()
                return
            except Exception as error:
                errors.log(error, "The process of a replica of %s cannot listen", self.tag)
                await self._cluster.clock.sleep(RETRY_S)
                self._changed.set()
                continue
            if not self._changed.is_set():
                self.told.set()

    async def leave(self, name: str, grace_s: float) -> None:
        """Have the child close a port, or all of them, and wait until it has."""
        leaving = self._call("stop_listening", name=name, grace_s=grace_s)
        await self._cluster.clock.wait_for(leaving, grace_s + ANSWER_S)


class ListeningChildren:
    """The children of one process, and the ports on which they listen."""

    def __init__(self, cluster: Process) -> None:
        self._cluster = cluster
        self._children: dict[CallChild, tuple[ListeningChild, asyncio.Task[None]]] = {}
        #: The start messages of the proxies, by their names.
        self._listeners: dict[str, bytes] = {}
        self._facts: dict[str, Any] = {}
        self._published: dict[str, Any] = {}
        self._watches: dict[str, Callable[[], None]] = {}
        self._rules_of: Callable[[str], Any] = lambda endpoint: None
        self._tasks = TaskSet(logger)

    @property
    def is_open(self) -> bool:
        """Whether the children listen anywhere."""
        return bool(self._listeners)

    def open(self, name: str, start: bytes, rules_of: Callable[[str], Any]) -> None:
        """Have the children listen on the port of a proxy."""
        self._listeners[name] = start
        self._rules_of = rules_of
        for child, _ in self._children.values():
            self._watch_key(f"backend/{child.tag}")
        self._tell()

    async def close(self, name: str, grace_s: float) -> None:
        """Have the children leave the port of a proxy, and wait until they have."""
        if self._listeners.pop(name, None) is None:
            return
        leaving = [child.leave(name, grace_s) for child, _ in self._children.values()]
        await asyncio.gather(*leaving, return_exceptions=True)

    def note(self, **facts: Any) -> None:
        """Note what proxies know: routes and others, in plain values."""
        self._facts.update(facts)
        if "routes" in facts:
            self._watch_endpoints()
        self._tell()

    def add(self, tag: str, call: CallChild) -> None:
        """Begin to tell a child."""
        child = ListeningChild(tag, call, self._cluster)
        self._children[call] = child, self._tasks.spawn(child.run(), "listening-child")
        if self.is_open:
            self._watch_key(f"backend/{tag}")
            child.tell(self._wanted(tag))

    async def remove(self, call: CallChild, grace_s: float) -> None:
        """Have a child stop to accept connections; return when those that it has have ended."""
        found = self._children.pop(call, None)
        if found is None:
            return
        child, task = found
        task.cancel()
        if not child.was_told:
            return
        try:
            await child.leave("", grace_s)
        except (ActorLostError, TimeoutError):
            pass  # it has ended already, or does not answer

    async def wait_until_told(self) -> None:
        """Return when all children have what is known now."""
        for child, _ in list(self._children.values()):
            await child.told.wait()

    def _watch_endpoints(self) -> None:
        keys = {f"endpoint/{fields['endpoint']}" for fields in (self._facts["routes"] or {}).values()}
        for key in [each for each in self._watches if each.startswith("endpoint/") and each not in keys]:
            self._watches.pop(key)()
            self._published.pop(key, None)
        for key in keys:
            self._watch_key(key)

    def _watch_key(self, key: str) -> None:
        if key not in self._watches:

            def update(value: Any) -> None:
                self._published[key] = value
                self._tell()

            # It may call `update` at once, which watches nothing.
            self._watches[key] = self._cluster.listener.watch(key, update)

    def _wanted(self, tag: str) -> dict[str, Any]:
        routes = self._facts.get("routes") or {}
        endpoints = {fields["endpoint"] for fields in routes.values()}
        backend = self._published.get(f"backend/{tag}")
        own = [
            each
            for each in endpoints
            if answers_itself(self._published.get(f"endpoint/{each}"), backend, tag)
        ]
        rules = {each: found for each in endpoints if (found := self._rules_of(each)) is not None}
        return {
            "listeners": dict(self._listeners) if self._facts.get("routes") is not None else {},
            "own": own,
            "rules": {each: list(found) for each, found in rules.items()},
            **self._facts,
        }

    def _tell(self) -> None:
        if not self.is_open:
            return
        for child, _ in self._children.values():
            child.tell(self._wanted(child.tag))


def listening_children(cluster: Process) -> ListeningChildren:
    """Return those of a process for an instance; the first call creates them."""
    found: ListeningChildren | None = cluster.shared.get(KEY)
    if found is None:
        found = cluster.shared[KEY] = ListeningChildren(cluster)
    return found


def pass_on(cluster: Process, endpoint: str, number: int, envelope: Envelope) -> ActorRequest:
    """Return a request of a child's listener for the routers of this process."""

    async def respond(receive: Receive, send: Send) -> Load:
        await cluster.shared["routers"].send(endpoint, envelope, receive, send)
        return Load()

    return TaskRequest(respond)
