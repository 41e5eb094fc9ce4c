"""Which address counts as the client behind reverse proxies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tables import each_case

from daskserve.common.types import Receive, Send
from daskserve.options.http import HTTPOptions
from daskserve.proxies.asgi import Scope
from daskserve.proxies.ingress.forwarded import ForwardedHeaders


def seen(peer: Any, *headers: tuple[bytes, bytes], scheme: str = "http") -> tuple[Any, str]:
    """Return the client and scheme that the application sees; 10/8 and ::1 are trusted."""
    found: list[tuple[Any, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append((scope["client"], scope["scheme"]))

    scope = {"type": "http", "client": peer, "scheme": scheme, "headers": [(b"host", b"x"), *headers]}
    wrapped = ForwardedHeaders(app, ["10.0.0.0/8", "::1"])
    asyncio.run(wrapped(scope, None, None))  # type: ignore[arg-type]
    return found[0]


def forwarded(*hops: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-forwarded-for", hop.encode("latin-1")) for hop in hops]


PROXY = ("10.1.2.3", 5000)


def test_forwarded_headers_of_an_untrusted_client_are_ignored() -> None:
    stranger = ("192.0.2.9", 1)
    assert seen(stranger, *forwarded("1.1.1.1"), (b"x-forwarded-proto", b"https")) == (stranger, "http")
    assert seen(None, *forwarded("1.1.1.1")) == (None, "http")


@each_case(
    ("hops", "client"),
    [
        (["192.0.2.9"], "192.0.2.9"),
        (["1.1.1.1, 192.0.2.9"], "192.0.2.9"),  # the client claims another address
        (["192.0.2.9, 10.9.9.9"], "192.0.2.9"),  # two proxies of ours
        (["192.0.2.9", "10.9.9.9"], "192.0.2.9"),  # as two headers
        (["10.7.7.7, 10.9.9.9"], "10.7.7.7"),  # a client of our own network
        (["192.0.2.9:4711"], "192.0.2.9"),
        (["[2001:db8::1]:4711"], "2001:db8::1"),
        (["2001:db8::1"], "2001:db8::1"),
        (["192.0.2.9, unknown"], None),
        (["unknown, 10.9.9.9"], "10.9.9.9"),
        ([""], None),
        (["\xff"], None),
        (["192.0.2.9, " + "1" * 65], None),  # too long to be one
        ([], None),
    ],
)
def test_the_first_address_from_the_right_that_is_no_proxy_is_the_client(
    hops: list[str], client: str | None
) -> None:
    assert seen(PROXY, *forwarded(*hops))[0] == (PROXY if client is None else (client, 0))


def test_the_last_proxys_scheme_counts() -> None:
    assert seen(PROXY, (b"x-forwarded-proto", b"https"))[1] == "https"
    assert seen(PROXY, (b"x-forwarded-proto", b"http, https"))[1] == "https"
    assert seen(PROXY, (b"x-forwarded-proto", b"https, http"))[1] == "http"
    assert seen(PROXY, (b"x-forwarded-proto", b"https"), scheme="ws")[1] == "wss"
    assert seen(PROXY, (b"x-forwarded-proto", b"javascript"))[1] == "http"


def test_addresses_of_both_kinds_are_trusted() -> None:
    assert seen(("::1", 1, 0, 0), *forwarded("192.0.2.9"))[0] == ("192.0.2.9", 0)
    assert seen(("::ffff:10.1.1.1", 1), *forwarded("192.0.2.9"))[0] == ("192.0.2.9", 0)
    assert seen(("unix", 1), *forwarded("192.0.2.9"))[0] == ("unix", 1)


def test_an_invalid_address_in_the_options_is_refused() -> None:
    assert HTTPOptions(trusted_forwarders=["10.0.0.0/8", "::1"]).trusted_forwarders == ["10.0.0.0/8", "::1"]
    with pytest.raises(ValueError, match="no-address"):
        HTTPOptions(trusted_forwarders=["no-address"])
