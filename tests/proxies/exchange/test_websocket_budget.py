"""The memory limit for the messages of all WebSockets together."""

from __future__ import annotations

import asyncio

from http_harness import poll_for, serving
from test_websocket import Echo, client_of
from wsproto.events import CloseConnection
from wsproto.events import Message as DataMessage

from daskserve.options.http import HTTPOptions
from daskserve.proxies.exchange.limits.limits import Budget, InflationRules, Limits
from daskserve.proxies.exchange.websocket.inbox import WebSocketInbox
from daskserve.proxies.server.server import HTTPServer


def received_bytes(server: HTTPServer) -> float:
    return next(value for name, labels, value in server.samples("i") if labels[1:] == ("received",))


def test_a_budget_can_be_used_up() -> None:
    budget = Budget(10)
    assert budget.acquire(10)
    assert not budget.acquire(1)
    budget.release(1)
    assert budget.used_bytes == budget.size_bytes


async def test_a_message_beyond_the_budget_of_all_closes_with_1013() -> None:
    app = Echo()
    async with (
        serving(app, max_buffered_bytes=1000) as server,
        client_of(server) as greedy,
        client_of(server) as client,
    ):
        await greedy.open()
        await client.open()
        await greedy.send(DataMessage(data="x" * 900, message_finished=False))
        await poll_for(lambda: received_bytes(server) == 900)
        await client.send(DataMessage(data="x" * 200))
        assert (await client.closed())[0] == 1013
        await poll_for(lambda: received_bytes(server) == 900)
        await greedy.send(CloseConnection(1000))
        await poll_for(lambda: received_bytes(server) == 0)
        samples = server.samples("i")
        assert ("http_limited_requests", ("i", "max_buffered_bytes"), 1) in samples


async def test_messages_that_were_taken_count_no_more() -> None:
    async with serving(Echo(), max_buffered_bytes=1000) as server, client_of(server) as client:
        await client.open()
        for _ in range(5):
            assert await client.text("x" * 900) == "x" * 900
        assert received_bytes(server) == 0


async def test_an_application_may_give_up_waiting_for_a_message_any_number_of_times() -> None:
    inbox = WebSocketInbox(Limits())
    for _ in range(10):
        waiting = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert not inbox._takers
    waiting = asyncio.ensure_future(inbox.take())
    await asyncio.sleep(0)
    inbox.put({"type": "websocket.receive"}, 1)
    assert await waiting == {"type": "websocket.receive"}


def test_the_limits_of_compressed_messages_are_those_of_the_options() -> None:
    options = HTTPOptions(
        max_websocket_inflation_ratio=2, max_websocket_inflation_per_s=3, max_websocket_message_bytes=4
    )
    assert Limits(options).inflation == InflationRules(2, 3, 4)


def test_unread_messages_are_freed_when_the_application_ends() -> None:
    limits = Limits(HTTPOptions())
    inbox = WebSocketInbox(limits)
    for is_finished in (True, True, False):
        inbox.add_part(DataMessage(data=b"x" * 100, message_finished=is_finished), 1000)
    assert limits.received.used_bytes == 300
    inbox.end({"type": "websocket.disconnect"})
    assert limits.received.used_bytes == 200
    inbox.release()
    assert limits.received.used_bytes == 0
