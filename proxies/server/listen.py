"""Opens listening sockets, and raises clear errors if they cannot be opened.

With ``SO_REUSEPORT``, another program of the same user can bind a port that is in use, without an error, and
then gets a share of its connections. So the first listener of an instance on a host checks that the port is
free: it first binds a socket without this option.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from typing import Any

from daskserve.errors import BadRequestError, InstanceError, PortInUseError
from daskserve.options.http import HTTPOptions

#: Maximum number of connections that wait to be accepted; Linux limits it to ``net.core.somaxconn``.
BACKLOG = 2048
#: Attempts at finding a free port: one that is free for IPv4 may be in use for IPv6.
_FREE_PORT_ATTEMPTS = 8

_NO_SUCH_ADDRESS = frozenset((errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT))


def can_share_ports() -> bool:
    """Return whether several processes can listen on one port on this platform."""
    return hasattr(socket, "SO_REUSEPORT")


async def bind_sockets(
    host: str, port: int, *, reuse_port: bool = False, claims_port: bool = True, option: str = "port"
) -> list[socket.socket]:
    """Return one listening, non-blocking socket for each address of ``host``, all on one port.

    Parameters
    ----------
    host : str
        A name, an IPv4 or an IPv6 address; empty for every address of the machine.
    port : int
        0 selects a free port.
    reuse_port : bool
        Whether other listeners of the same user may share the port.
    claims_port : bool
        Whether to raise an error if other listeners share the port. False for the second and later listeners
        of an instance.
    option : str
        The HTTP option that sets the port, for errors.

    Raises
    ------
    PortInUseError
        Another program listens on the port.
    BadRequestError
        The host does not resolve, is not an address of this machine, or the platform cannot share ports.
    InstanceError
        The operating system reports another error.
    """
    if reuse_port and not can_share_ports():
        raise BadRequestError("This platform has no SO_REUSEPORT, so proxies cannot share one port.")
    addresses = await _resolve(host, port)
    attempts_left = 1 if port else _FREE_PORT_ATTEMPTS
    while True:
        attempts_left -= 1
        try:
            return _bind_all(host, port, addresses, reuse_port=reuse_port, claims_port=claims_port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not attempts_left:
                raise _explained(error, host, port, option) from error


def check_ports(options: HTTPOptions) -> None:
    """Raise the error that a proxy on this machine would raise if it listened now; see `bind_sockets`."""
    requested = [(options.host, options.port, "port")]
    if options.health_port is not None:
        requested.append((options.health_host or options.host, options.health_port, "health_port"))
    for host, port, option in requested if options.has_proxies else ():
        for each in asyncio.run(bind_sockets(host or "", port, option=option)):
            each.close()


async def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    bare = host.strip().removeprefix("[").removesuffix("]") or None
    flags = socket.AI_PASSIVE
    try:
        try:
            found = socket.getaddrinfo(
                bare, port, type=socket.SOCK_STREAM, flags=flags | socket.AI_NUMERICHOST
            )
        except socket.gaierror:
            # Resolving a name may take long, so it runs in another thread.
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        raise BadRequestError(
            f"Cannot listen on {host!r}: the name does not resolve ({error}). "
            "Use an address of this machine, or 0.0.0.0 for all of them."
        ) from error
    # IPv4 first, so that a free port is chosen where most clients connect; the dict drops duplicates.
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))


def _bind_all(
    host: str, port: int, addresses: list[tuple[int, Any]], *, reuse_port: bool, claims_port: bool
) -> list[socket.socket]:
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        absent: OSError | None = None
        for family, address in addresses:
            bound = (address[0], port, *address[2:])
            try:
                if reuse_port and claims_port:
                    with _listening(family, bound) as trial:
                        bound = (address[0], trial.getsockname()[1], *address[2:])
                sock = _listening(family, bound, reuse_port=reuse_port)
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                absent = error  # for example ::1 for localhost in a container; others may work
                continue
            sockets.append(opened.enter_context(sock))
            port = sock.getsockname()[1]
        if not sockets:
            raise BadRequestError(
                f"Cannot listen on {host!r}: it is not an address of this machine. "
                "Use one that is, or 0.0.0.0 for all of them."
            ) from absent
        opened.pop_all()
        return sockets


def _listening(family: int, address: Any, *, reuse_port: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            # A port whose last connections are still in TIME_WAIT is free.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # Otherwise "::" would also take the IPv4 port, or fail if that is bound separately.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _explained(error: OSError, host: str, port: int, option: str) -> InstanceError:
    if error.errno == errno.EADDRINUSE:
        free = "; 0 takes a free one" if option == "port" else ""
        return PortInUseError(
            f"{host}:{port} is in use by another program or another instance. Stop that one, or choose "
            f'another port with http_options={{"{option}": ...}}{free}.'
        )
    if error.errno == errno.EACCES:
        return InstanceError(
            f"Not allowed to listen on {host}:{port}; ports below 1024 usually need special rights. "
            f'Choose another port with http_options={{"{option}": ...}}.'
        )
    return InstanceError(f"Cannot listen on {host}:{port}: {error}")
