"""uvicorn's protocol class counts connections and pauses a transport, as the server built on it expects."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from daskserve.internals.uvicorn import HTTPProtocol, ProtocolState

pytestmark = pytest.mark.smoke


async def app(scope: Any, receive: Any, send: Any) -> None: ...


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
