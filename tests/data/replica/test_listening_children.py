"""What a worker tells the children that listen, and which requests they may answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tables import each_case

from daskserve.common.clock import LoopClock
from daskserve.data.replica.process.listening import ListeningChildren, answers_itself
from daskserve.errors import ActorLostError

ENDPOINT = {"traffic": {"b": 1.0}, "shadows": {}}
BACKEND = {"replicas": [["b#1", "tcp://w:1", 1]]}
ROUTES = {"/b": {"endpoint": "e", "methods": ["GET"]}}


@each_case(
    ("endpoint", "backend", "expected"),
    [
        (ENDPOINT, {"router": None}, True),
        ({**ENDPOINT, "traffic": {"b": 1.0, "c": 0.0}}, {"x": 1}, True),
        ({**ENDPOINT, "traffic": {"c": 1.0}}, {"x": 1}, False),
        ({**ENDPOINT, "traffic": {"b": 0.5, "c": 0.5}}, {"x": 1}, False),
        ({**ENDPOINT, "shadows": {"c": 0.1}}, {"x": 1}, False),
        (ENDPOINT, {"router": "prefix"}, False),
        (ENDPOINT, {"order": "priority"}, False),
        (ENDPOINT, {"hedging": {"percentile": 99}}, False),
        (ENDPOINT, {"rollout": {"new": {}}}, False),
        (None, {"x": 1}, False),  # not published yet
        (ENDPOINT, None, False),  # deleted
    ],
)
def test_a_replica_answers_itself_only_what_needs_no_router(
    endpoint: Any, backend: Any, expected: bool
) -> None:
    assert answers_itself(endpoint, backend, "b") is expected


class Published:
    """The listener of a process, with values that a test publishes."""

    def __init__(self) -> None:
        self.watchers: dict[str, Callable[[Any], None]] = {}
        self.clock = LoopClock()
        self.shared: dict[str, Any] = {}
        self.listener = SimpleNamespace(watch=self._watch)

    def _watch(self, key: str, watcher: Callable[[Any], None]) -> Callable[[], None]:
        self.watchers[key] = watcher
        return lambda: self.watchers.pop(key) and None


class Child:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.is_lost = False

    async def call(self, verb: str, **message: Any) -> None:
        if self.is_lost:
            raise ActorLostError("gone", begun=False)
        self.calls.append((verb, message))

    @property
    def wanted(self) -> dict[str, Any]:
        return self.calls[-1][1]["wanted"]


async def open_children(cluster: Any, child: Child) -> ListeningChildren:
    children = ListeningChildren(cluster)
    children.add("b", child.call)
    children.note(routes=ROUTES)
    children.open("proxy", b"start", lambda endpoint: ("stream", 10))
    await children.wait_until_told()
    return children


async def test_without_a_proxy_that_asks_for_it_a_child_is_told_nothing() -> None:
    cluster, child = Published(), Child()
    children = ListeningChildren(cluster)  # type: ignore[arg-type]
    children.add("b", child.call)
    await children.wait_until_told()
    await asyncio.sleep(0)
    assert child.calls == []
    assert cluster.watchers == {}
    await children.remove(child.call, 0)
    assert child.calls == []


async def test_a_child_is_told_ports_routes_and_what_is_its_own() -> None:
    cluster, child = Published(), Child()
    children = await open_children(cluster, child)
    assert child.wanted["listeners"] == {"proxy": b"start"}
    assert child.wanted["own"] == []
    assert child.wanted["rules"] == {"e": ["stream", 10]}
    cluster.watchers["endpoint/e"](ENDPOINT)
    cluster.watchers["backend/b"]({"router": None})
    await children.wait_until_told()
    assert child.wanted["own"] == ["e"]
    children.note(routes={})
    await children.wait_until_told()
    assert child.wanted["routes"] == {}
    assert "endpoint/e" not in cluster.watchers
    await children.remove(child.call, 0)


async def test_a_child_leaves_the_port_of_a_proxy_that_stops() -> None:
    cluster, child = Published(), Child()
    children = await open_children(cluster, child)
    await children.close("proxy", 5.0)
    assert child.calls[-1] == ("stop_listening", {"name": "proxy", "grace_s": 5.0})
    assert not children.is_open
    await children.remove(child.call, 0)


async def test_a_lost_child_holds_up_nothing() -> None:
    cluster, child = Published(), Child()
    children = await open_children(cluster, child)
    child.is_lost = True
    children.note(unready=["b"])
    await children.wait_until_told()
    await children.close("proxy", 0)
    await children.remove(child.call, 0)
