from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from tables import each_case

from daskserve.errors import BadRequestError, InstanceError, PortInUseError
from daskserve.options.http import HTTPOptions, Location
from daskserve.proxies.server import listen

needs_reuse_port = pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="no SO_REUSEPORT here")


def bind_sockets(host: str, port: int, **options: bool) -> list[socket.socket]:
    return asyncio.run(listen.bind_sockets(host, port, **options))


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def bound(host: str, port: int = 0, **options: bool) -> Iterator[list[socket.socket]]:
    sockets = bind_sockets(host, port, **options)
    try:
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


def port_of(sockets: list[socket.socket]) -> int:
    ports = {sock.getsockname()[1] for sock in sockets}
    assert len(ports) == 1
    return int(ports.pop())


@contextlib.contextmanager
def holder(*, reuse_port: bool) -> Iterator[int]:
    """Run another program that listens on a port."""
    with socket.socket() as sock:
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


@each_case("host", ["127.0.0.1", "localhost", "0.0.0.0", "", "::1", "[::1]", "::"])
def test_valid_hosts_are_accepted(host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6 here")
    with bound(host) as sockets:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        port = port_of(sockets)
        with socket.socket(family) as client:
            client.connect(("::1" if ":" in host else "127.0.0.1", port))


@needs_reuse_port
@pytest.mark.parametrize("held_shared", [False, True])
@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_taken_port_is_an_error_even_if_it_could_be_shared(held_shared: bool, reuse_port: bool) -> None:
    with holder(reuse_port=held_shared) as port:
        with pytest.raises(PortInUseError) as raised:
            bind_sockets("127.0.0.1", port, reuse_port=reuse_port)
    assert f"127.0.0.1:{port}" in str(raised.value)
    assert "another port" in str(raised.value)


@needs_reuse_port
def test_an_instance_shares_the_port_it_has_claimed() -> None:
    with bound("127.0.0.1", 0, reuse_port=True) as first:
        port = port_of(first)
        with bound("127.0.0.1", port, reuse_port=True, claims_port=False) as second:
            assert port_of(second) == port


def test_a_port_is_free_again_after_its_listener_has_closed() -> None:
    with bound("127.0.0.1") as sockets:
        port = port_of(sockets)
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted = sockets[0].accept()[0]
            accepted.close()  # the side that closes first holds TIME_WAIT
            assert client.recv(1) == b""
    with bound("127.0.0.1", port):
        pass


def test_an_unresolvable_host_is_named_in_the_error() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with mock.patch("socket.getaddrinfo", side_effect=unknown):
        with pytest.raises(BadRequestError, match=r"'nowhere'.*does not resolve.*Name or service"):
            bind_sockets("nowhere", 0)


def test_a_slow_name_server_does_not_block_the_event_loop() -> None:
    """Other tasks of the loop continue meanwhile, and decide when the name is resolved."""
    resolves = threading.Event()
    real = socket.getaddrinfo

    def getaddrinfo(
        host: str, port: int, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return real(host, port, family, type, proto, flags)
        assert resolves.wait(10)
        return real("127.0.0.1", port, family, type, proto, flags)

    async def test() -> None:
        binding = asyncio.create_task(listen.bind_sockets("slow.example", 0))
        await asyncio.sleep(0)
        resolves.set()
        (sock,) = await binding
        assert sock.getsockname()[0] == "127.0.0.1"
        sock.close()

    with mock.patch("socket.getaddrinfo", getaddrinfo):
        asyncio.run(test())


def test_an_invalid_host_is_named_in_the_error() -> None:
    with pytest.raises(BadRequestError, match=r"'a\.\.b'.*does not resolve"):
        bind_sockets("a..b", 0)


def test_a_host_of_another_machine_is_named_in_the_error() -> None:
    with pytest.raises(BadRequestError, match=r"'192\.0\.2\.1'.*not an address of this machine"):
        bind_sockets("192.0.2.1", 0)


@each_case(
    ("code", "words"), [(errno.EACCES, "special rights"), (errno.ENOBUFS, "Cannot listen on 127.0.0.1:80")]
)
def test_other_refusals_are_explained(code: int, words: str) -> None:
    with mock.patch.object(socket.socket, "bind", side_effect=OSError(code, "no")):
        with pytest.raises(InstanceError, match=words):
            bind_sockets("127.0.0.1", 80)


def test_a_missing_address_is_ignored_if_another_is_available() -> None:
    infos = [
        (family, socket.SOCK_STREAM, 6, "", (address, 0))
        for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET, "127.0.0.1"))
    ]
    with mock.patch("socket.getaddrinfo", return_value=infos), bound("two-addresses") as sockets:
        assert [sock.getsockname()[0] for sock in sockets] == ["127.0.0.1"]


def test_a_free_port_is_free_in_all_address_families() -> None:
    """The first port chosen is taken on the second address: the next attempt takes another one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", 0)) for n in (1, 2)]
        real_bind = socket.socket.bind
        asked: list[tuple[str, int]] = []

        def bind(sock: socket.socket, address: tuple[str, int]) -> None:
            asked.append(address)
            real_bind(sock, taken.getsockname() if len(asked) == 2 else address)

        with mock.patch("socket.getaddrinfo", return_value=infos):
            with mock.patch.object(socket.socket, "bind", bind), bound("two-addresses") as sockets:
                assert len(sockets) == 2
                port_of(sockets)
    assert len(asked) == 4


def test_ports_are_checked_before_anything_starts_unless_nothing_will_listen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        listen.check_ports(HTTPOptions(host="127.0.0.1", port=0))
        listen.check_ports(HTTPOptions(host="127.0.0.1", port=port, location=Location.NO_SERVER))
        with pytest.raises(PortInUseError, match=rf"{port}"):
            listen.check_ports(HTTPOptions(host="127.0.0.1", port=port))
        with pytest.raises(PortInUseError, match="health_port"):
            listen.check_ports(HTTPOptions(host="127.0.0.1", port=0, health_port=port))
        with pytest.raises(PortInUseError, match="health_port"):
            listen.check_ports(
                HTTPOptions(host="127.0.0.2", port=0, health_port=port, health_host="127.0.0.1")
            )
    listen.check_ports(HTTPOptions(host="127.0.0.1", port=0, health_port=port))
