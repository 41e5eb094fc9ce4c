"""uvicorn's protocol class reads requests and pauses a transport, as the server built on it expects."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from daskserve.internals.uvicorn import HTTPProtocol, ProtocolState

pytestmark = pytest.mark.smoke


class Reading(HTTPProtocol):
    """Notes what the parser reports."""

    def __init__(self, state: ProtocolState) -> None:
        super().__init__(state)
        self.noted: list[Any] = []

    def on_message_begin(self) -> None:
        self.url = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.noted.append((name, value))

    def on_headers_complete(self) -> None:
        self.noted.append((self.parser.get_method(), self.url))

    def on_body(self, body: bytes) -> None:
        self.noted.append(body)

    def on_message_complete(self) -> None:
        self.noted.append("complete")


async def app(scope: Any, receive: Any, send: Any) -> None: ...


def test_the_parser_calls_the_protocol() -> None:
    async def main() -> None:
        protocol = Reading(ProtocolState(app))
        protocol.parser.feed_data(b"POST /a")
        protocol.parser.feed_data(b"/b?c HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
        assert protocol.noted == [
            (b"Host", b"x"),
            (b"Content-Length", b"2"),
            (b"POST", b"/a/b?c"),
            b"hi",
            "complete",
        ]

    asyncio.run(main())


def test_a_connection_is_counted_and_its_reading_can_be_paused_twice() -> None:
    async def main() -> None:
        state = ProtocolState(app)
        transport = Mock(spec=asyncio.Transport)
        transport.get_extra_info.return_value = None
        protocol = HTTPProtocol(state)
        protocol.connection_made(transport)
        assert state.connections == protocol.connections == {protocol}
        assert protocol.transport is transport
        assert protocol.loop is asyncio.get_running_loop()
        for _ in range(2):
            protocol.flow.pause_reading()
        for _ in range(2):
            protocol.flow.resume_reading()
        assert transport.pause_reading.call_count == transport.resume_reading.call_count == 1
        assert protocol.eof_received() is None

    asyncio.run(main())
