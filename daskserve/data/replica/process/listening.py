"""Child processes that serve connections of the proxies of their worker.

The proxies of a worker register here, together with their facts: routes, and rules for bodies. Each child
gets these facts when it has started and after each change, and then connections of the proxies. One task for
each child sends the changes, so a blocked child delays only itself.

A connection moves, while it is open, to a child that answers its requests, and back to the proxy when it has
a request for another endpoint, or when the child stops. If the child was killed, the proxy continues with
its connections, too: see `daskserve.data.replica.process.given_connections`.

The counters of a child's listeners belong to the proxy (`Port.samples`), and are kept when the child has
ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from daskserve.cluster.protocols.base import Process, TaskRequest
from daskserve.common.types import ActorRequest, Envelope, Load, Receive, Send
from daskserve.data.replica.process.given_connections import GivenConnections
from daskserve.data.replica.process.port import Port
from daskserve.errors import ActorLostError
from daskserve.loops.connection_table import LostAttempt, MovedConnection
from daskserve.loops.tasks import TaskSet
from daskserve.telemetry.error_log import ErrorLog

logger = logging.getLogger("daskserve.replica")

#: The key of the `ListeningChildren` in ``cluster.shared``.
KEY = "listening_children"
#: The pause before the next attempt if a child cannot listen; it doubles up to the second value.
RETRY_S, RETRY_MOST_S = 1.0, 60.0
#: How long after the grace period a child may report that it has closed a port.
ANSWER_S = 1.0
#: How long connections may stay open at a child that no longer answers any endpoint itself.
LEAVE_S = 86_400.0
#: How long a change waits for the children, any of which may be blocked.
NOTIFY_S = 1.0

CallChild = Callable[..., Awaitable[Any]]
HandOver = Callable[[str, Sequence[int]], None]


def answers_itself(
    endpoint: Mapping[str, Any] | None,
    backend: Mapping[str, Any] | None,
    backend_tag: str,
    replica_tag: str,
    *,
    has_only_proxy: bool = False,
) -> bool:
    """Return whether a replica of a backend may answer any request of an endpoint.

    Other requests need a router: to draw a backend or a version, to send copies, or because an option of the
    backend chooses among replicas or orders requests. A replica that the routers do not list must not answer
    any. If the instance has one proxy, only its routers send requests to replicas of other workers.
    """
    if not endpoint or not backend:
        return False
    traffic = [each for each, weight in endpoint["traffic"].items() if weight > 0]
    if traffic != [backend_tag] or endpoint["shadows"]:
        return False
    workers = {tag: worker for tag, worker, *_ in backend["replicas"]}
    if replica_tag not in workers or (has_only_proxy and len(set(workers.values())) > 1):
        return False
    return not any(backend.get(each) for each in ("router", "order", "hedging", "rollout"))


class ListeningChild:
    """One child, and the task that sends it each change.

    The child gets connections only while it answers an endpoint itself, because all other requests would
    merely pass through it.

    Parameters
    ----------
    wanted : callable
        Returns the facts for the child, and the ports whose connections it should get.
    """

    def __init__(
        self,
        backend_tag: str,
        replica_tag: str,
        call: CallChild,
        hand_over: HandOver,
        cluster: Process,
        wanted: Callable[[ListeningChild], tuple[dict[str, Any], Sequence[Port]]],
    ) -> None:
        self.backend_tag, self.replica_tag = backend_tag, replica_tag
        self._call, self._hand_over, self._cluster = call, hand_over, cluster
        self._wanted = wanted
        #: The keys of the listeners that the child should have, and the ports of all its listeners, by key.
        self._keys: dict[Port, str] = {}
        self._open: dict[str, Port] = {}
        self._connections: dict[str, GivenConnections] = {}
        self._numbers = itertools.count(1)
        #: The task of `run`.
        self.updating: asyncio.Task[None] | None = None
        self._changed, self.notified = asyncio.Event(), asyncio.Event()
        self.notified.set()
        self._is_failing = False  # the child could not listen, so its requests go to the proxy
        self._leaving = TaskSet(logger)

    def notify(self) -> None:
        """Schedule an update of the child; it contains all changes up to the time when it is sent."""
        if not self._is_failing:
            self.notified.clear()
        self._changed.set()

    async def run(self) -> None:
        """Send the child each change until it ends."""
        errors = ErrorLog(logger)
        pause_s = RETRY_S
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                try:
                    await self._listen()
                except ActorLostError:
                    return
                except Exception as error:
                    errors.log(error, "The process of %s cannot listen", self.replica_tag)
                    self._is_failing = True
                    self._withdraw()
                    self.notified.set()
                    await self._cluster.clock.sleep(pause_s)
                    pause_s = min(2 * pause_s, RETRY_MOST_S)
                    self._changed.set()
                    continue
                pause_s, self._is_failing = RETRY_S, False
                if not self._changed.is_set():
                    self.notified.set()
        finally:
            self.notified.set()
            self._withdraw()

    async def _listen(self) -> None:
        wanted, ports = self._wanted(self)
        for port in [each for each in self._keys if each not in ports]:
            leaving = self.leave(port, LEAVE_S, sends_away=False, gives_back=True)
            self._leaving.spawn(leaving, "listening-leave")
        for port in ports:
            if port not in self._keys:
                key = f"{port.name}#{next(self._numbers)}"
                connections = port.connections()
                try:
                    self._hand_over(key, connections.files)
                except OSError:  # the child has ended, or takes no files
                    port.drop(connections)
                    raise
                self._keys[port] = key
                self._open[key], self._connections[key] = port, connections
        if not self._open:
            return
        listeners = {self._keys[each]: each.start for each in ports}
        await self._call("listen", wanted={**wanted, "listeners": listeners})
        for port in ports:
            if port in self._keys:
                port.offer(self._connections[self._keys[port]], frozenset(wanted["own"]))

    def _withdraw(self) -> None:
        for key, connections in self._connections.items():
            self._open[key].withdraw(connections)

    async def leave(
        self, port: Port, grace_s: float, *, sends_away: bool = True, gives_back: bool = False
    ) -> None:
        """Close a port of the child; return when its connections have ended.

        For ``sends_away`` and ``gives_back``, see `daskserve.proxies.server.server.HTTPServer.drain`.
        """
        key = self._keys.pop(port, None)
        if key is not None:
            port.withdraw(self._connections[key])
            if await self._stop(key, grace_s, sends_away=sends_away, gives_back=gives_back):
                self._fold([key])

    async def end(self, grace_s: float) -> bool:
        """Close all ports of the child for good, and give its connections back or close them.

        Returns whether the child has confirmed that. Otherwise its connections wait until its process ends.
        """
        if self.updating is not None:
            self.updating.cancel()
        self._withdraw()
        if self._open and not await self._stop("", grace_s, sends_away=True, gives_back=True):
            return False
        self.mark_ended()
        return True

    def mark_ended(self, lost: LostAttempt | None = None) -> None:
        """Record that the child has ended; its connections continue elsewhere if it is ``lost``."""
        if self.updating is not None:
            self.updating.cancel()
        self._fold(list(self._open), lost)

    async def _stop(self, key: str, grace_s: float, *, sends_away: bool, gives_back: bool) -> bool:
        leaving = self._call(
            "stop_listening", key=key, grace_s=grace_s, sends_away=sends_away, gives_back=gives_back
        )
        try:
            self.report(await self._cluster.clock.wait_for(leaving, grace_s + ANSWER_S))
        except (ActorLostError, TimeoutError):
            return False  # its connections continue elsewhere when its process has ended
        return True

    def report(self, listeners: Mapping[str, Any]) -> None:
        """Record the metrics of the child's listeners, by their keys."""
        for key, samples in listeners.items():
            if key in self._open:
                self._open[key].report(self._name(key), samples)

    def _fold(self, keys: Iterable[str], lost: LostAttempt | None = None) -> None:
        for key in keys:
            if key in self._open:
                port = self._open.pop(key)
                port.drop(self._connections.pop(key), lost)
                port.fold(self._name(key))

    def _name(self, key: str) -> str:
        return f"{self.replica_tag} {key}"


class ListeningChildren:
    """The children of one process, and the ports on which they listen."""

    def __init__(self, cluster: Process) -> None:
        self._cluster = cluster
        #: The children, by the tags of their replicas.
        self._children: dict[str, ListeningChild] = {}
        self._ports: list[Port] = []
        self._facts: dict[str, Any] = {}
        self._published: dict[str, Any] = {}
        self._watches: dict[str, Callable[[], None]] = {}
        self._rules_of: Callable[[str], Any] = lambda endpoint: None
        self._tasks = TaskSet(logger)

    @property
    def is_open(self) -> bool:
        """Whether the children listen anywhere."""
        return bool(self._ports)

    def open_port(
        self,
        name: str,
        start: bytes,
        max_connections: int,
        serve: Callable[[MovedConnection], object],
        rules_of: Callable[[str], Any],
        *,
        is_only: bool = False,
    ) -> Port:
        """Let the children serve connections of a proxy; see `Port`."""
        port = Port(name, start, max_connections, serve, is_only=is_only)
        self._ports.append(port)
        self._rules_of = rules_of
        for child in self._children.values():
            self._watch_key(f"backend/{child.backend_tag}")
        self._watch_endpoints()
        self._notify()
        return port

    async def close_port(self, port: Port, grace_s: float) -> None:
        """Close a port of all children, and wait for the end of their connections."""
        if port not in self._ports:
            return
        self._ports.remove(port)
        if not self._ports:
            for key in list(self._watches):
                self._unwatch(key)
        await asyncio.gather(*(child.leave(port, grace_s) for child in list(self._children.values())))

    def note(self, **facts: Any) -> None:
        """Record facts of the proxies, such as routes, in plain values."""
        self._facts.update(facts)
        if self.is_open and "routes" in facts:
            self._watch_endpoints()
        self._notify()

    def add(self, backend_tag: str, replica_tag: str, call: CallChild, hand_over: HandOver) -> None:
        """Add a child; from now on, it gets all changes."""
        child = ListeningChild(backend_tag, replica_tag, call, hand_over, self._cluster, self._wanted)
        self._children[replica_tag] = child
        child.updating = self._tasks.spawn(child.run(), "listening-child")
        if self.is_open:
            self._watch_key(f"backend/{backend_tag}")
            child.notify()

    def report(self, replica_tag: str, listeners: Mapping[str, Any]) -> None:
        """Record the metrics of a child's listeners, by their keys."""
        if (child := self._children.get(replica_tag)) is not None:
            child.report(listeners)

    async def remove(self, replica_tag: str, grace_s: float) -> None:
        """Close the ports of a child; return when it has no more connections."""
        child = self._children.get(replica_tag)
        if child is not None and await child.end(grace_s):
            self._pop(replica_tag)

    def forget(self, replica_tag: str, lost: LostAttempt) -> None:
        """Record that a child's process has ended, and why."""
        if (child := self._pop(replica_tag)) is not None:
            child.mark_ended(lost)

    def _pop(self, replica_tag: str) -> ListeningChild | None:
        child = self._children.pop(replica_tag, None)
        if child is not None and all(
            each.backend_tag != child.backend_tag for each in self._children.values()
        ):
            self._unwatch(f"backend/{child.backend_tag}")
        return child

    async def wait_until_notified(self) -> None:
        """Return when all children know the current facts, or after `NOTIFY_S`."""
        waiting = [asyncio.ensure_future(child.notified.wait()) for child in self._children.values()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=NOTIFY_S)
            for each in late:
                each.cancel()

    def _watch_endpoints(self) -> None:
        keys = {f"endpoint/{fields['endpoint']}" for fields in (self._facts.get("routes") or {}).values()}
        for key in [each for each in self._watches if each.startswith("endpoint/") and each not in keys]:
            self._unwatch(key)
        for key in keys:
            self._watch_key(key)

    def _unwatch(self, key: str) -> None:
        if key in self._watches:
            self._watches.pop(key)()
            self._published.pop(key, None)

    def _watch_key(self, key: str) -> None:
        if key not in self._watches:

            def update(value: Any) -> None:
                self._published[key] = value
                self._notify()

            # `watch` may call `update` at once, which does not add a watch.
            self._watches[key] = self._cluster.listener.watch(key, update)

    def _wanted(self, child: ListeningChild) -> tuple[dict[str, Any], list[Port]]:
        routes = self._facts.get("routes") or {}
        endpoints = {fields["endpoint"] for fields in routes.values()}
        backend = self._published.get(f"backend/{child.backend_tag}")
        own = [
            each
            for each in endpoints
            if answers_itself(
                self._published.get(f"endpoint/{each}"),
                backend,
                child.backend_tag,
                child.replica_tag,
                has_only_proxy=any(port.is_only for port in self._ports),
            )
        ]
        for port in self._ports:
            port.endpoints = frozenset(endpoints)
        rules = {each: list(found) for each in endpoints if (found := self._rules_of(each)) is not None}
        return {"own": own, "rules": rules, **self._facts}, list(self._ports) if own else []

    def _notify(self) -> None:
        if self.is_open:
            for child in self._children.values():
                child.notify()


def listening_children(cluster: Process) -> ListeningChildren:
    """Return the `ListeningChildren` of a process for an instance; the first call creates them."""
    found: ListeningChildren | None = cluster.shared.get(KEY)
    if found is None:
        found = cluster.shared[KEY] = ListeningChildren(cluster)
    return found


def pass_on(cluster: Process, endpoint: str, number: int, envelope: Envelope) -> ActorRequest:
    """Return a request from a child's listener, to be sent by the routers of this process."""

    async def respond(receive: Receive, send: Send) -> Load:
        await cluster.shared["routers"].send(endpoint, envelope, receive, send)
        return Load()

    return TaskRequest(respond)
