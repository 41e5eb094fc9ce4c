"""Who the client really is, when a reverse proxy stands in front.

``X-Forwarded-For`` and ``X-Forwarded-Proto`` say so, but anybody can send them. They are believed only from
addresses that the operator named, and read from the right: each proxy appends who it heard from, so the first
address that is not a trusted proxy's is the client, and whatever stands left of it is the client's own claim.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.types import Receive, Send

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

FORWARDED_FOR = b"x-forwarded-for"
FORWARDED_PROTO = b"x-forwarded-proto"
_SECURE: Mapping[str, str] = {"http": "https", "ws": "wss"}


def parse_networks(names: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks that addresses such as ``10.0.0.7`` or ``10.0.0.0/8`` stand for.

    Raises
    ------
    ValueError
        One is neither an address nor a network.
    """
    return tuple(ipaddress.ip_network(name, strict=False) for name in names)


class ForwardedHeaders:
    """Puts the real client and scheme into the scopes of requests that come through trusted proxies.

    Parameters
    ----------
    trusted : sequence of str
        Addresses and networks of the proxies.
    """

    def __init__(self, app: ASGIApp, trusted: Sequence[str]) -> None:
        self._app = app
        self._networks = parse_networks(trusted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if client is not None and self._is_trusted(client[0]):
            self._believe(scope)
        await self._app(scope, receive, send)

    def _believe(self, scope: Scope) -> None:
        hops: list[str] = []
        scheme = ""
        for name, value in scope["headers"]:
            if name == FORWARDED_FOR:
                hops += value.decode("latin-1").split(",")
            elif name == FORWARDED_PROTO:
                scheme = value.decode("latin-1").rpartition(",")[2].strip().lower()
        client = self._client_of(hops)
        if client is not None:
            scope["client"] = (client, 0)  # its port is not told
        if scheme in ("https", "wss"):
            scope["scheme"] = _SECURE.get(scope["scheme"], scope["scheme"])

    def _client_of(self, hops: Sequence[str]) -> str | None:
        found = None
        for hop in reversed(hops):
            address = _address_of(hop.strip())
            if address is None:
                break  # no address: what stands left of it cannot be believed either
            found = address
            if not self._is_trusted(address):
                break
        return found

    def _is_trusted(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


def _address_of(hop: str) -> str | None:
    """Return the address in one part of the header, which may carry a port; None if there is none."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return str(ipaddress.ip_address(hop))
    except ValueError:
        return None
