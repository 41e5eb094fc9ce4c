"""The clients of a chaos run: they send every kind of request, and record how each one ended."""

from __future__ import annotations

import http.client
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

from blocking_websocket import WebSocketClient
from chaos_app import CHUNKS
from chaos_verdict import Sample
from wsproto.events import AcceptConnection, CloseConnection, Request
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError

PAUSE_S = 0.03
#: How often proxies are checked, and the timeout of their answer.
CHECK_S, CHECK_TIMEOUT_S = 0.5, 2.0
CONNECT_S = 1.0
#: The timeout of a request: longer than any allowed wait.
TIMEOUT_S = 40.0
#: How many clients send each kind, one request after the other.
CLIENTS = {"GET": 2, "POST": 2, "stream": 2, "websocket": 2, "call": 2}

#: Number of samples that are searched for a recent answer.
RECENT = 1000

ROUTE = "/target"

Address = tuple[str, int]


class Balancer:
    """Acts like a load balancer: it checks the proxies, and leaves out those that do not answer.

    It closes the connections to a proxy that does not answer, because clients could not reach that proxy
    either. A proxy that refuses, for example because it drains, keeps its connections and gets no new ones.
    """

    def __init__(self) -> None:
        self._is_alive: dict[Address, bool] = {}
        self._connections: dict[Address, set[socket.socket]] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._turn = itertools.count()
        self._threads: list[threading.Thread] = []

    def know(self, urls: Sequence[str]) -> None:
        """Add addresses; none is removed, because proxies come back at their address."""
        for url in urls:
            parts = urlsplit(url)
            address = parts.hostname or "", parts.port or 0
            if address not in self._is_alive:
                self._is_alive[address], self._connections[address] = True, set()
                thread = threading.Thread(target=self._check, args=(address,))
                self._threads.append(thread)
                thread.start()

    def living(self) -> list[Address]:
        return sorted(address for address, is_alive in self._is_alive.items() if is_alive)

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    @contextmanager
    def connection(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield a connection to the next live proxy, with its address; wait until there is one."""
        while True:
            living = self.living()
            if living:
                address = living[next(self._turn) % len(living)]
                try:
                    sock = socket.create_connection(address, timeout=CONNECT_S)
                    break
                except OSError:
                    self._is_alive[address] = False
            if self._is_over.wait(PAUSE_S):
                raise NoProxyError
        sock.settimeout(TIMEOUT_S)
        with self._lock:
            self._connections[address].add(sock)
        try:
            yield address[0], sock
        finally:
            with self._lock:
                self._connections[address].discard(sock)
            sock.close()

    def _check(self, address: Address) -> None:
        while not self._is_over.wait(CHECK_S):
            health = health_of(address)
            self._is_alive[address] = health == "good"
            if health == "silent":
                with self._lock:
                    for sock in self._connections[address]:
                        _end(sock)


class NoProxyError(Exception):
    """The run ended before there was a proxy."""


class CutShortError(Exception):
    """A response has begun, but is incomplete."""


class GoingAwayError(Exception):
    """A stopping replica or proxy has told the client of a WebSocket to connect again."""


def health_of(address: Address) -> Literal["good", "refuses", "silent"]:
    """Return whether a proxy accepts requests, refuses them or their connections, or does not answer."""
    connection = http.client.HTTPConnection(*address, timeout=CHECK_TIMEOUT_S)
    try:
        connection.request("GET", "/-/healthz")
        return "good" if connection.getresponse().status == http.client.OK else "refuses"
    except (ConnectionError, http.client.HTTPException):
        return "refuses"
    except OSError:  # no answer in time, or no route to the machine
        return "silent"
    finally:
        connection.close()


def _end(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


# ---- requests


def by_http(address: str, sock: socket.socket, kind: str, request_id: str) -> int:
    """Send a request; return the version that answered, or raise an error."""
    connection = http.client.HTTPConnection(address)
    connection.sock = sock
    method = "POST" if kind == "POST" else "GET"
    connection.request(method, f"{ROUTE}?kind={kind}&id={request_id}", headers={"Connection": "close"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise RuntimeError(f"{response.status} {response.read()[:200].decode()}")
    try:
        lines = response.read().decode().splitlines()
    except (OSError, http.client.HTTPException) as error:
        raise CutShortError(repr(error)) from None
    if len(lines) != (CHUNKS if kind == "stream" else 1):
        raise CutShortError(f"{len(lines)} lines")
    return int(lines[0])


def by_websocket(address: str, sock: socket.socket, request_id: str) -> int:
    socket_client = WebSocketClient(sock)
    socket_client.send(Request(host=address, target=f"{ROUTE}?id={request_id}"))
    event = socket_client.event()
    if not isinstance(event, AcceptConnection):
        raise RuntimeError(f"no handshake: {event}")
    version = -1
    for _ in range(CHUNKS):
        try:
            version = int(socket_client.ask("ping"))
        except LocalProtocolError:
            _raise_for_end(socket_client.event())
        except AssertionError as error:
            _raise_for_end(error.args[0])
    return version


def _raise_for_end(event: object) -> NoReturn:
    if isinstance(event, CloseConnection) and event.code == CloseReason.GOING_AWAY:
        raise GoingAwayError
    raise RuntimeError(f"closed: {event}")


class Clients:
    """All clients, each in a separate thread, until `stop`."""

    def __init__(self, balancer: Balancer, call: Callable[[str], int]) -> None:
        self._balancer = balancer
        self._call = call
        self._is_over = threading.Event()
        self._numbers = itertools.count()
        self.samples: list[Sample] = []
        self._threads: list[threading.Thread] = []

    def start(self, clients: Mapping[str, int] = CLIENTS) -> None:
        self._is_over.clear()
        self._threads = [
            threading.Thread(target=self._keep_sending, args=(kind,))
            for kind, count in clients.items()
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the clients once their requests in flight have completed."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def unanswered(self, since: float) -> str:
        """Return the kinds of requests without an answer since a time."""
        answered = {each.kind for each in self.samples[-RECENT:] if each.is_good and each.began > since}
        return ", ".join(f"an answer to a {kind}" for kind in CLIENTS if kind not in answered)

    def _keep_sending(self, kind: str) -> None:
        while not self._is_over.wait(PAUSE_S):
            self.send(kind)

    def send(self, kind: str) -> Sample | None:
        """Send one request and record how it ended."""
        request_id = f"{kind}-{next(self._numbers)}"
        sample = self._sent_by_handle(request_id) if kind == "call" else self._sent(kind, request_id)
        if sample is not None:
            self.samples.append(sample)
        return sample

    def _sent_by_handle(self, request_id: str) -> Sample:
        began = time.monotonic()
        outcome, version, _ = _outcome(lambda: self._call(request_id))
        return Sample("call", request_id, began, time.monotonic(), outcome, version=version)

    def _sent(self, kind: str, request_id: str) -> Sample | None:
        def send() -> int:
            if kind == "websocket":
                return by_websocket(address, sock, request_id)
            return by_http(address, sock, kind, request_id)

        try:
            with self._balancer.connection() as (address, sock):
                began = time.monotonic()
                outcome, version, detail = _outcome(send)
                return Sample(kind, request_id, began, time.monotonic(), outcome, address, version, detail)
        except NoProxyError:
            return None


def _outcome(send: Callable[[], Any]) -> tuple[str, int, str]:
    """Return how a request ended, the version that answered, and how the response was cut short."""
    try:
        return "ok", send(), ""
    except CutShortError as error:
        return "cut short", -1, str(error)
    except GoingAwayError:
        return "going away", -1, ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300], -1, ""
