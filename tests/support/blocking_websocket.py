"""A blocking WebSocket client, for servers that run in other threads or processes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import BytesMessage, CloseConnection, Message, Request, TextMessage


class WebSocketClient:
    """A blocking client of one WebSocket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._events: list[Any] = []

    def send(self, event: Any) -> None:
        self._sock.sendall(self._protocol.send(event))

    def set_timeout(self, seconds: float) -> None:
        self._sock.settimeout(seconds)

    def event(self) -> Any:
        while not self._events:
            data = self._sock.recv(1 << 20)
            self._protocol.receive_data(data or None)
            self._events += self._protocol.events()
            if not data:
                return None
        return self._events.pop(0)

    def message(self) -> Any:
        parts = []
        while True:
            event = self.event()
            assert isinstance(event, (TextMessage, BytesMessage)), event
            parts.append(event.data)
            if event.message_finished:
                return type(parts[0])().join(parts)

    def ask(self, data: Any) -> Any:
        self.send(Message(data=data))
        return self.message()

    def closed(self) -> int:
        event = self.event()
        assert isinstance(event, CloseConnection), event
        self.send(event.response())
        return int(event.code)


@contextmanager
def talk(url: str) -> Iterator[WebSocketClient]:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as sock:
        client = WebSocketClient(sock)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        client.send(Request(host="test", target=target))
        yield client
