"""The connections that a proxy gives to a child, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
from connection_records import receive
from tables import each_case

from daskserve.data.replica.process import given_connections
from daskserve.data.replica.process.given_connections import GivenConnections
from daskserve.data.replica.process.port import Port
from daskserve.errors import ActorLostError
from daskserve.loops.connection_table import (
    EVICT,
    GIVE_BACK,
    SLOT_NUMBER,
    ConnectionRecord,
    LostAttempt,
    MovedConnection,
    map_table,
    receive_message,
)
from daskserve.testing import wait_until

LOST = LostAttempt(ActorLostError("gone", begun=True), "tcp://w:1")
REQUEST = b"GET / HTTP/1.1\r\n\r\n"


class Child:
    """The other side: it takes connections when the test says so."""

    def __init__(self, given: GivenConnections) -> None:
        pair, memory = given.files
        self._pair = socket.socket(fileno=os.dup(pair))
        self._pair.setblocking(False)
        self._memory = map_table(memory)
        self.records: dict[int, ConnectionRecord] = {}
        self._socks: dict[int, socket.socket] = {}

    def messages(self) -> list[int]:
        """Take all connections that wait; return the other messages."""
        found = []
        while True:
            try:
                message = receive_message(self._pair)
            except BlockingIOError:
                return found
            assert message is not None
            slot, files = message
            if files:
                self._socks[slot] = socket.socket(fileno=files[0])
                self.records[slot] = ConnectionRecord(self._memory, slot)
            else:
                found.append(slot)

    def end(self, slot: int, flag: int = 0) -> None:
        self._socks.pop(slot).close()
        self._pair.send(SLOT_NUMBER.pack(slot | flag))

    def refuse(self) -> None:
        """Return a connection that cannot be received."""
        message = receive_message(self._pair)
        assert message is not None
        slot, files = message
        for each in files:
            os.close(each)
        self._pair.send(SLOT_NUMBER.pack(slot | GIVE_BACK))

    def close(self) -> None:
        for each in self._socks.values():
            each.close()
        self._pair.close()


class Proxy:
    """A port, and the connections that the proxy itself serves."""

    def __init__(self, max_connections: int = 10) -> None:
        self.served: list[MovedConnection] = []
        self.port = Port("proxy", b"start", max_connections, self.served.append)
        self.port.endpoints = frozenset("e")
        self._opened: list[Any] = []

    def child(self, own: str = "e") -> tuple[GivenConnections, Child]:
        given = self.port.connections()
        child = Child(given)
        self.port.offer(given, frozenset(own))
        self._opened += [given, child]
        return given, child

    def give(self, count: int, endpoint: str | None = None) -> list[bool]:
        found = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            self._opened.append(theirs)
            give = self.port.taker_of(endpoint)
            found.append(give is not None and give(MovedConnection(ours)))
            if not found[-1]:
                ours.close()
        return found

    def is_open(self, number: int) -> bool:
        """Return whether a connection is open, in the order in which they were given."""
        client = [each for each in self._opened if isinstance(each, socket.socket)][number]
        client.setblocking(False)
        try:
            return client.recv(1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        for each in [*self._opened, *(moved.sock for moved in self.served)]:
            each.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with closing(Proxy()) as found:
        yield found


async def test_children_get_equal_shares_of_the_connections(proxy: Proxy) -> None:
    (one, first), (other, second) = proxy.child(), proxy.child()
    assert proxy.give(10) == [True] * 10
    assert (len(one), len(other), proxy.port.given()) == (5, 5, 10)
    first.messages()
    for slot in list(first.records)[:3]:
        first.end(slot)
    await wait_until(lambda: len(one) == 2)
    assert [proxy.is_open(number) for number in range(10)].count(False) == 3
    assert proxy.give(3) == [True] * 3
    assert (len(one), len(other)) == (5, 5)
    assert second.messages() == []
    assert len(second.records) == 5


async def test_a_new_connection_is_given_only_to_a_child_that_answers_everything(proxy: Proxy) -> None:
    one, _ = proxy.child("e")
    proxy.port.endpoints = frozenset("ef")
    assert proxy.give(1) == [False]
    assert proxy.give(1, "f") == [False]
    assert proxy.give(1, "e") == [True]
    all_of_them, _ = proxy.child("ef")
    assert proxy.give(1) == [True]
    assert (len(one), len(all_of_them)) == (1, 1)


async def test_a_child_gets_no_more_connections_than_it_may_have() -> None:
    with closing(Proxy(max_connections=2)) as proxy:
        given, child = proxy.child()
        assert proxy.give(3) == [True, True, False]
        child.messages()
        child.end(next(iter(child.records)))
        await wait_until(lambda: len(given) == 1)
        assert proxy.give(2) == [True, False]
        proxy.port.evict()
        assert child.messages() == [EVICT]


def idle(record: ConnectionRecord) -> None: ...


def half(record: ConnectionRecord) -> None:
    receive(record, REQUEST[:5])


def begun(record: ConnectionRecord) -> None:
    receive(record, REQUEST)
    record.begin()


def answering(record: ConnectionRecord) -> None:
    begun(record)
    record.fix()


@each_case(
    ("steps", "received", "lost"),
    [(idle, b"", None), (half, REQUEST[:5], None), (begun, REQUEST, LOST), (answering, None, None)],
)
async def test_connections_of_a_killed_child_continue_unless_they_have_a_part_of_a_response(
    steps: Any, received: bytes | None, lost: LostAttempt | None
) -> None:
    with closing(Proxy()) as proxy:
        given, child = proxy.child()
        proxy.give(1)
        child.messages()
        steps(child.records[0])
        child.close()
        proxy.port.drop(given, LOST)
        assert proxy.is_open(0) is (received is not None)
        found = [(each.received, each.lost, each.stays) for each in proxy.served]
        assert found == ([] if received is None else [(received, lost, False)])
        assert proxy.port.given() == 0


@pytest.mark.parametrize("how", ["killed", "drained"])
async def test_other_work_of_the_event_loop_goes_on_while_many_connections_come_back(how: str) -> None:
    count = 250
    with closing(Proxy(max_connections=count)) as proxy:
        given, child = proxy.child()
        for _ in range(5):
            proxy.give(count // 5)
            child.messages()
        if how == "killed":
            proxy.port.drop(given, LOST)
        else:
            proxy.port.withdraw(given)
            for slot in range(count):
                child.end(slot, GIVE_BACK)
        steps = [len(proxy.served)]
        loop = asyncio.get_running_loop()

        def note() -> None:
            steps.append(len(proxy.served))
            if steps[-1] < count:
                loop.call_soon(note)

        note()
        await wait_until(lambda: len(proxy.served) == count)
        assert max(after - before for before, after in pairwise([0, *steps])) <= 100
        assert proxy.port.given() == 0


async def test_connections_that_a_killed_child_had_not_taken_go_to_another_one(proxy: Proxy) -> None:
    given, _ = proxy.child()
    proxy.give(3)
    _, other = proxy.child()
    proxy.port.drop(given, LOST)
    other.messages()
    assert len(other.records) == 3
    assert proxy.served == []


async def test_what_a_killed_child_had_ended_stays_ended(proxy: Proxy) -> None:
    given, child = proxy.child()
    proxy.give(2)
    child.messages()
    child.end(0)
    proxy.port.drop(given, LOST)
    assert [proxy.is_open(0), proxy.is_open(1)] == [False, True]


async def test_a_child_that_takes_nothing_gets_nothing_for_a_while(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given_connections, "CHECK_S", 0.001)
    monkeypatch.setattr(given_connections, "UNTAKEN_S", 0.01)
    monkeypatch.setattr(given_connections, "BLOCKED_S", 0.05)
    given, child = proxy.child()
    proxy.give(1)
    child.messages()  # the last ones that it takes
    proxy.give(2)
    await wait_until(lambda: len(proxy.served) == 2)
    assert len(given) == 1
    assert proxy.give(1) == [False]
    await wait_until(lambda: given.has_room)
    assert proxy.give(1) == [True]
    assert child.messages() == []
    assert len(child.records) == 2


async def test_a_child_without_descriptors_gets_nothing_for_a_while(proxy: Proxy) -> None:
    given, child = proxy.child()
    proxy.give(1)
    child.refuse()
    await wait_until(lambda: len(proxy.served) == 1)  # and not the child once more
    assert not given.has_room


async def test_a_connection_that_comes_back_with_a_request_stays(proxy: Proxy) -> None:
    _, child = proxy.child()
    _, other = proxy.child()
    proxy.give(2)
    child.messages()
    half(child.records[0])
    child.end(0, GIVE_BACK)
    await wait_until(lambda: bool(proxy.served))
    assert [(each.received, each.stays) for each in proxy.served] == [(REQUEST[:5], True)]
    other.messages()
    other.end(0, GIVE_BACK)  # without a request, it goes on to the child that has fewer

    def is_taken() -> bool:
        child.messages()
        return len(child.records) == 1 and len(proxy.served) == 1 and child.records[0].can_move()

    await wait_until(is_taken)


async def test_a_new_child_gets_its_share_of_open_connections(proxy: Proxy) -> None:
    _, first = proxy.child()
    proxy.give(4)
    first.messages()
    new, _ = proxy.child()
    asked = first.messages()
    assert len(asked) == 2
    assert all(each & GIVE_BACK for each in asked)
    for each in asked:
        first.end(each & ~GIVE_BACK, GIVE_BACK)
    await wait_until(lambda: len(new) == 2)
    assert proxy.served == []


async def test_a_child_that_is_withdrawn_keeps_what_it_has_taken(proxy: Proxy) -> None:
    given, child = proxy.child()
    proxy.give(1)
    child.messages()
    proxy.give(1)
    proxy.port.withdraw(given)
    assert len(given) == len(proxy.served) == 1
    assert proxy.give(1) == [False]
    proxy.port.drop(given)
    child.close()
    assert [proxy.is_open(0), proxy.is_open(1)] == [False, True]
