"""What a worker tells the children that serve connections, and which requests they may answer."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from connection_records import receive
from replica_starts import replica_start
from tables import each_case

from daskserve.common.clock import LoopClock
from daskserve.context import current_instance
from daskserve.data.replica.process.code import ChildCode
from daskserve.data.replica.process.listening import KEY as SHARED_KEY
from daskserve.data.replica.process.listening import (
    LEAVE_S,
    ListeningChildren,
    answers_itself,
)
from daskserve.data.replica.process.port import Port, with_children
from daskserve.data.replica.process.replica import ReplicaServer
from daskserve.errors import ActorLostError
from daskserve.loops.connection_table import (
    ConnectionRecord,
    LostAttempt,
    MovedConnection,
    map_table,
    receive_message,
)
from daskserve.telemetry.collector import MAX_ENDED, SWEEP_EVERY
from daskserve.telemetry.replica import ReplicaMetrics
from daskserve.testing import run_virtual

ENDPOINT = {"traffic": {"b": 1.0}, "shadows": {}}
BACKEND = {"replicas": [["b#1", "tcp://w:1", 1]]}
#: The first listener of a child.
KEY = "proxy#1"
LOST = LostAttempt(ActorLostError("gone", begun=True), "tcp://w:1")
ROUTES = {"/b": {"endpoint": "e", "methods": ["GET"]}}


@each_case(
    ("endpoint", "backend", "expected"),
    [
        (ENDPOINT, BACKEND, True),
        ({**ENDPOINT, "traffic": {"b": 1.0, "c": 0.0}}, BACKEND, True),
        ({**ENDPOINT, "traffic": {"c": 1.0}}, BACKEND, False),
        ({**ENDPOINT, "traffic": {"b": 0.5, "c": 0.5}}, BACKEND, False),
        ({**ENDPOINT, "shadows": {"c": 0.1}}, BACKEND, False),
        (ENDPOINT, {**BACKEND, "router": "prefix"}, False),
        (ENDPOINT, {**BACKEND, "order": "priority"}, False),
        (ENDPOINT, {**BACKEND, "hedging": {"percentile": 99}}, False),
        (ENDPOINT, {**BACKEND, "rollout": {"new": {}}}, False),
        (ENDPOINT, {"replicas": [["b#2", "tcp://w:1", 1]]}, False),  # it stops, or is not healthy
        (None, BACKEND, False),  # not published yet
        (ENDPOINT, None, False),  # deleted
    ],
)
def test_a_replica_answers_itself_only_what_needs_no_router(
    endpoint: Any, backend: Any, expected: bool
) -> None:
    assert answers_itself(endpoint, backend, "b", "b#1") is expected


@each_case("worker, expected", [("tcp://w:1", True), ("tcp://w:2", False)])
def test_the_only_proxy_spreads_requests_over_the_replicas_of_all_workers(
    worker: str, expected: bool
) -> None:
    backend = {"replicas": [*BACKEND["replicas"], ["b#2", worker, 1]]}
    assert answers_itself(ENDPOINT, backend, "b", "b#1", has_only_proxy=True) is expected
    assert answers_itself(ENDPOINT, backend, "b", "b#1")


class Published:
    """The listener for published values of a process, with values that a test publishes."""

    def __init__(self) -> None:
        self.watchers: dict[str, Callable[[Any], None]] = {}
        self.published: dict[str, Any] = {}
        self.clock = LoopClock()
        self.shared: dict[str, Any] = {}
        self.listener = SimpleNamespace(watch=self._watch)

    def _watch(self, key: str, watcher: Callable[[Any], None]) -> Callable[[], None]:
        self.watchers[key] = watcher
        if key in self.published:
            watcher(self.published[key])
        return lambda: self.watchers.pop(key) and None


class Child:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.given: list[tuple[str, list[int]]] = []
        self.is_lost = False
        #: The counts of the child's listeners, by port.
        self.counted: dict[str, Any] = {}

    async def call(self, verb: str, **message: Any) -> Any:
        if self.is_lost:
            raise ActorLostError("gone", begun=False)
        for _ in range(5):  # a process does not answer at once
            await asyncio.sleep(0)
        self.calls.append((verb, message))
        return self.counted if verb == "stop_listening" else None

    def hand_over(self, key: str, files: Any) -> None:
        self.given.append((key, list(files)))

    @property
    def wanted(self) -> dict[str, Any]:
        return self.calls[-1][1]["wanted"]  # type: ignore[no-any-return]


class Opened:
    """The children of a process with one child, and the port of one proxy."""

    def __init__(self, cluster: Any, child: Child | None = None) -> None:
        self.child = child or Child()
        self.children = ListeningChildren(cluster)
        self.children.add("b", "b#1", self.child.call, self.child.hand_over)
        cluster.published |= {"endpoint/e": ENDPOINT, "backend/b": BACKEND}
        self.children.note(routes=ROUTES)
        #: The connections that the proxy serves itself.
        self.served: list[MovedConnection] = []
        self.port = self.children.open_port(
            "proxy", b"start", 10, self._serve, lambda endpoint: ("stream", 10)
        )

    def _serve(self, moved: MovedConnection) -> None:
        self.served.append(moved)
        moved.sock.close()

    def gives(self) -> bool:
        """Return whether a child gets new connections."""
        ours, theirs = socket.socketpair()
        with theirs:
            give = self.port.taker_of(None)
            if give is not None and give(MovedConnection(ours)):
                return True
            ours.close()
            return False


async def opened(cluster: Any) -> Opened:
    found = Opened(cluster)
    await found.children.wait_until_notified()
    return found


def counted(count: int, ongoing: int = 0) -> list[Any]:
    return [
        ["http_requests", ["i", "/b", "e", "GET", "200"], count],
        ["http_requests", ["i", "/b", "e", "GET", "500"], 1],
        ["http_ongoing_requests", ["i"], ongoing],
    ]


async def test_without_a_proxy_that_asks_for_it_a_child_is_told_nothing() -> None:
    cluster, child = Published(), Child()
    children = ListeningChildren(cluster)  # type: ignore[arg-type]
    children.add("b", "b#1", child.call, child.hand_over)
    await children.wait_until_notified()
    await asyncio.sleep(0)
    assert cluster.watchers == {}
    await children.remove("b#1", 0)
    assert child.calls == child.given == []


async def test_a_child_gets_its_files_once_and_is_told_routes_and_what_is_its_own() -> None:
    cluster = Published()
    found = await opened(cluster)
    child = found.child
    assert [key for key, _ in child.given] == [KEY]
    assert child.wanted["listeners"] == {KEY: b"start"}
    assert child.wanted["own"] == ["e"]
    assert child.wanted["rules"] == {"e": ["stream", 10]}
    found.children.note(routes={**ROUTES, "/other": {"endpoint": "other", "methods": ["GET"]}})
    await found.children.wait_until_notified()
    assert child.wanted["routes"].keys() == {"/b", "/other"}
    assert [key for key, _ in child.given] == [KEY]
    await found.children.remove("b#1", 0)


async def test_a_child_leaves_the_port_while_no_endpoint_is_its_own() -> None:
    cluster = Published()
    found = await opened(cluster)
    child = found.child
    cluster.watchers["endpoint/e"]({**ENDPOINT, "traffic": {"c": 1.0}})
    await found.children.wait_until_notified()
    await asyncio.sleep(0)
    left = {"key": KEY, "grace_s": LEAVE_S, "sends_away": False, "gives_back": True}
    assert ("stop_listening", left) in child.calls
    assert not found.gives()
    cluster.watchers["endpoint/e"](ENDPOINT)
    await found.children.wait_until_notified()
    assert found.gives()
    assert [key for key, _ in child.given] == [KEY, "proxy#2"]
    assert child.wanted["listeners"] == {"proxy#2": b"start"}
    found.children.note(routes={})
    await found.children.wait_until_notified()
    assert "endpoint/e" not in cluster.watchers
    await found.children.remove("b#1", 0)


async def test_endpoints_and_backends_are_watched_while_a_proxy_is_open() -> None:
    cluster = Published()
    found = await opened(cluster)
    assert set(cluster.watchers) == {"endpoint/e", "backend/b"}
    await found.children.close_port(found.port, 0)
    found.children.note(routes={**ROUTES, "/other": {"endpoint": "other", "methods": ["GET"]}})
    assert cluster.watchers == {}
    found.children.open_port("proxy", b"start", 10, lambda moved: None, lambda endpoint: None)
    assert set(cluster.watchers) == {"endpoint/e", "endpoint/other", "backend/b"}
    await found.children.remove("b#1", 0)


async def test_changes_at_once_are_told_once() -> None:
    cluster = Published()
    found = await opened(cluster)
    before = len(found.child.calls)
    for number in range(100):
        cluster.watchers["endpoint/e"]({**ENDPOINT, "number": number})
    await found.children.wait_until_notified()
    assert len(found.child.calls) == before + 1
    await found.children.remove("b#1", 0)


async def test_a_backend_is_watched_while_it_has_children_here() -> None:
    cluster, other = Published(), Child()
    found = await opened(cluster)
    found.children.add("b", "b#2", other.call, other.hand_over)
    await found.children.remove("b#1", 0)
    assert "backend/b" in cluster.watchers
    found.children.forget("b#2", LOST)
    assert "backend/b" not in cluster.watchers


@pytest.mark.parametrize("how", ["close", "remove", "forget"])
async def test_a_proxy_gives_connections_to_a_child_until_it_leaves(how: str) -> None:
    found = await opened(Published())
    assert found.gives()
    sent = {"grace_s": 5.0, "sends_away": True}
    if how == "close":
        await found.children.close_port(found.port, 5.0)
        assert found.child.calls[-1] == ("stop_listening", {"key": KEY, "gives_back": False, **sent})
    elif how == "remove":
        await found.children.remove("b#1", 5.0)
        assert found.child.calls[-1] == ("stop_listening", {"key": "", "gives_back": True, **sent})
    else:
        found.children.forget("b#1", LOST)
    assert not found.gives()
    assert found.port.given() == 0
    await found.children.remove("b#1", 0)


@pytest.mark.parametrize("how", ["close", "remove", "forget"])
async def test_the_counts_of_a_child_stay_when_it_listens_no_more(how: str) -> None:
    found = await opened(Published())
    found.children.report("b#1", {KEY: counted(3, ongoing=2)})
    found.child.counted = {KEY: counted(5, ongoing=1)}
    own = {"ongoing": 1, "responses": {"2xx": 2}, "ended": 2, "failed": 0, "endpoints": {}}
    assert with_children(own, found.port.samples()) == {
        "ongoing": 3,
        "responses": {"2xx": 5, "5xx": 1},
        "ended": 6,
        "failed": 1,
        "endpoints": {"e": [4, 1]},
    }
    if how == "close":
        await found.children.close_port(found.port, 0)
    elif how == "remove":
        await found.children.remove("b#1", 0)
    else:  # killed: what it was last asked for
        found.children.forget("b#1", LOST)
    found.children.report("b#1", {KEY: counted(9)})  # read before it ended
    total = with_children(own, found.port.samples())
    assert (total["ongoing"], total["ended"]) == (1, 6 if how == "forget" else 8)
    await found.children.remove("b#1", 0)


def test_the_number_of_kept_counts_of_ended_children_is_bounded() -> None:
    port = Port("proxy", b"start", 10, bool)
    for number in range(0, 10 * MAX_ENDED, 1000):
        routes = range(number, number + 1000)
        port.report("b#1", [["http_requests", ["i", f"/{each}", "e", "GET", "200"], 1] for each in routes])
        port.fold("b#1")
    assert len(port.samples()) <= MAX_ENDED + SWEEP_EVERY


async def test_a_lost_child_holds_up_nothing() -> None:
    found = await opened(Published())
    found.child.is_lost = True
    found.children.note(unready=["b"])
    await found.children.wait_until_notified()
    assert not found.gives()
    await found.children.close_port(found.port, 0)
    await found.children.remove("b#1", 0)
    assert found.port.given() == 0
    found.children.forget("b#1", LOST)


async def test_connections_of_a_child_that_dies_while_it_stops_continue_when_it_has_ended() -> None:
    found = await opened(Published())
    assert found.gives()
    ((_, (pair, memory)),) = found.child.given
    record = ConnectionRecord(map_table(memory), 0)  # the child has taken the connection
    receive(record, b"GET / HTTP/1.1\r\n\r\n")
    record.begin()
    with socket.socket(fileno=os.dup(pair)) as taking:
        message = receive_message(taking)
    assert message is not None
    os.close(message[1][0])
    found.child.is_lost = True
    await found.children.remove("b#1", 0)
    assert found.port.given() == 1
    found.children.forget("b#1", LOST)
    assert [each.lost for each in found.served] == [LOST]
    assert found.port.given() == 0


def test_a_child_that_cannot_listen_gets_nothing_delays_no_change_and_is_asked_more_and_more_rarely() -> None:
    class Broken(Child):
        is_broken = True

        async def call(self, verb: str, **message: Any) -> Any:
            if self.is_broken and verb == "listen":
                self.calls.append((verb, message))
                raise RuntimeError("a module is missing")
            return await super().call(verb, **message)

    async def main() -> None:
        cluster, child = Published(), Broken()
        found = Opened(cluster, child)
        clock = LoopClock()
        began = clock.now()
        for number in range(3):
            found.children.note(unready=[str(number)])
            await found.children.wait_until_notified()
        assert clock.now() == began
        await clock.sleep(1000.0)
        assert 10 < len(child.calls) < 30
        assert not found.gives()
        child.is_broken = False
        await clock.sleep(60.0)
        assert found.gives()
        child.is_broken = True
        found.children.note(unready=[])
        await found.children.wait_until_notified()
        assert not found.gives()
        await found.children.remove("b#1", 0)

    run_virtual(main)


def test_draining_takes_no_longer_than_the_grace_period() -> None:
    class Slow(ListeningChildren):
        async def remove(self, replica_tag: str, grace_s: float) -> None:
            await asyncio.sleep(grace_s)

    async def main() -> None:
        clock, cluster = LoopClock(), Published()
        cluster.shared[SHARED_KEY] = Slow(cluster)  # type: ignore[arg-type]
        context: Any = SimpleNamespace(clock=clock, cluster=cluster)
        code = ChildCode(context, replica_start(len, concurrency=1), ReplicaMetrics())
        code.slots.ongoing = 1
        began = clock.now()
        with pytest.raises(TimeoutError):
            await code.drain(5.0)
        assert clock.now() - began == 5.0

    run_virtual(main)


async def test_the_log_records_of_listeners_have_the_name_of_their_instance() -> None:
    found = []

    class Listeners:
        async def listen(self, wanted: object) -> None:
            found.append(current_instance.get())

    server: Any = ReplicaServer(lambda *_: None, SimpleNamespace())  # type: ignore[arg-type]
    server._context = SimpleNamespace(spec=SimpleNamespace(instance="shop"))
    server._listeners = Listeners()
    await asyncio.create_task(server.listen({"listeners": {}}))
    assert found == ["shop"]
