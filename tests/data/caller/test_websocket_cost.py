"""When the messages of WebSockets cost less than a hop."""

from __future__ import annotations

import random

import pytest
from tables import each_case
from test_replica_pool import pool_of

from daskserve.common.types import Load
from daskserve.data.caller.pool.pooled_replica import PooledReplica
from daskserve.data.caller.pool.replica_pool import HOP_S, ReplicaPool
from daskserve.data.caller.pool.websocket_cost import WebSocketCost


@each_case(
    ("turn_s", "turns", "is_light"),
    [
        (0.0001, 1, True),
        (0.002, 1, False),  # more than a hop
        (0.0004, 500, True),  # a fifth of the second
        (0.0009, 500, False),  # each is less than a hop, but the process is half busy
        (0.00005, 19_900, False),  # the process has no time left
    ],
)
def test_turns_are_light_if_a_hop_would_cost_more(turn_s: float, turns: int, is_light: bool) -> None:
    meter = WebSocketCost()
    assert not meter.is_light(0.0, HOP_S)
    for _ in range(turns):
        meter.note(turn_s)
    assert meter.is_light(1.0, HOP_S) is is_light


def test_a_busy_time_that_is_over_does_not_count() -> None:
    meter = WebSocketCost()
    meter.is_light(0.0, HOP_S)
    for _ in range(1000):
        meter.note(0.0009)
    assert not meter.is_light(1.0, HOP_S)
    assert meter.is_light(2.0, HOP_S)


def test_one_slow_message_does_not_make_the_others_heavy_for_long() -> None:
    meter = WebSocketCost()
    meter.note(0.1)
    assert not meter.is_light(0.0, HOP_S)
    for _ in range(100):
        meter.note(0.00005)
    assert meter.is_light(1.0, HOP_S)


def open_sockets(pool: ReplicaPool, count: int) -> list[PooledReplica]:
    rng = random.Random(1)
    opened = []
    for _ in range(count):
        entry = pool.take(0.0, rng)
        assert entry is not None
        entry.sockets += 1
        opened.append(entry)
    return opened


def test_websockets_of_unknown_or_heavy_messages_are_spread() -> None:
    for turns_s in ((), (0.1,)):
        pool = pool_of("a", "b", "c", concurrency=100, local="a")
        for turn_s in turns_s:
            pool.websocket_cost.note(turn_s)
        near = sum(entry.tag == "a" for entry in open_sockets(pool, 30))
        assert 8 <= near <= 12


def test_websockets_of_light_messages_stay_near_while_there_is_room() -> None:
    pool = pool_of("a", "b", concurrency=20, local="a")
    pool.websocket_cost.note(0.0001)
    opened = open_sockets(pool, 25)
    assert [entry.tag for entry in opened] == ["a"] * 20 + ["b"] * 5


def test_a_replica_that_works_on_requests_is_not_near_to_a_websocket() -> None:
    pool = pool_of("a", "b", concurrency=20, local="a")
    pool.websocket_cost.note(0.0001)
    open_sockets(pool, 5)
    (request,) = (pool.take(0.0, random.Random(1)),)
    assert request is not None
    assert request.tag == "a"
    pool.report(request, Load(6), 0.1)  # its requests take 0.1 s
    assert [entry.tag for entry in open_sockets(pool, 1)] == ["b"]


def test_the_pace_of_requests_does_not_depend_on_open_websockets() -> None:
    pool = pool_of("a", concurrency=20, local="a")
    (socket,) = open_sockets(pool, 1)
    request = pool.take(60.0, random.Random(1))
    assert request is socket
    pool.report(request, Load(2), 60.01)
    assert request.pace_s == pytest.approx(0.01)
    pool.release(request)
    pool.report(socket, Load(1), 1000.0, is_answer=False)
    assert socket.pace_s == pytest.approx(0.01)
