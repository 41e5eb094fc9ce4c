"""Compression of WebSocket messages, under both servers."""

from __future__ import annotations

import tracemalloc
import zlib
from typing import Any

import pytest
from http_harness import hits, run, serving
from test_websocket import Echo, client_of
from wsproto.events import AcceptConnection, Ping, Pong
from wsproto.events import Message as DataMessage
from wsproto.extensions import PerMessageDeflate
from wsproto.frame_protocol import CloseReason, FrameProtocol, Opcode, RsvBits

from daskserve.proxies.exchange.deflate import BoundedDeflate

pytestmark = [pytest.mark.usefixtures("carrier"), pytest.mark.smoke]

LIMIT_BYTES = 100_000
TEXT = "all work and no play " * 1000


@pytest.mark.parametrize("is_on", [True, False])
def test_messages_are_compressed_if_both_sides_want_it(is_on: bool) -> None:
    async def test() -> None:
        async with serving(Echo(), websocket_compression=is_on) as server, client_of(server) as client:
            accepted = await client.open(extensions=[PerMessageDeflate()])
            assert isinstance(accepted, AcceptConnection)
            assert [each.name for each in accepted.extensions] == ["permessage-deflate"] * is_on
            assert await client.text(TEXT) == TEXT
            # Parts, with a ping between them; the second message refers to the first.
            await client.send(DataMessage(data=TEXT[:999], message_finished=False))
            await client.send(Ping(b"p"))
            await client.send(DataMessage(data=TEXT[999:]))
            assert isinstance(await client.event(), Pong)
            assert await client.message() == TEXT

    run(test)


def test_a_client_that_does_not_offer_it_gets_plain_messages() -> None:
    async def test() -> None:
        async with serving(Echo(), websocket_compression=True) as server, client_of(server) as client:
            assert (await client.open()).extensions == []
            assert await client.text(TEXT) == TEXT

    run(test)


@pytest.mark.parametrize("sizes", [[LIMIT_BYTES + 1], [LIMIT_BYTES - 1, 2]])
def test_the_size_limit_holds_for_what_a_message_becomes(sizes: list[int]) -> None:
    async def test() -> None:
        options: dict[str, Any] = {"websocket_compression": True, "max_websocket_message_bytes": LIMIT_BYTES}
        async with serving(Echo(), **options) as server, client_of(server) as client:
            await client.open(extensions=[PerMessageDeflate()])
            for _ in range(2):
                assert await client.text("x" * LIMIT_BYTES) == "x" * LIMIT_BYTES
            for size in sizes:
                await client.send(DataMessage(data="x" * size, message_finished=size == sizes[-1]))
            assert (await client.closed())[0] == 1009
            assert hits(server) == {"max_websocket_message_bytes": 1}

    run(test)


def test_data_that_is_not_compressed_properly_closes_the_connection() -> None:
    async def test() -> None:
        async with serving(Echo(), websocket_compression=True) as server, client_of(server) as client:
            await client.open(extensions=[PerMessageDeflate()])
            await client.send_raw(b"\xc1\x84\0\0\0\0\xff\xff\xff\xff")  # a compressed text, masked with zeros
            assert (await client.closed())[0] == 1007

    run(test)


def test_little_data_never_becomes_much() -> None:
    extension = BoundedDeflate(LIMIT_BYTES)
    assert extension.accept("permessage-deflate") == ""
    decoder = FrameProtocol(client=False, extensions=[extension])
    deflate = zlib.compressobj(wbits=-15)
    bomb = deflate.compress(bytes(64 << 20)) + deflate.flush(zlib.Z_SYNC_FLUSH)
    extension.frame_inbound_header(decoder, Opcode.BINARY, RsvBits(True, False, False), len(bomb))
    tracemalloc.start()
    try:
        assert extension.frame_inbound_payload_data(decoder, bomb) is CloseReason.MESSAGE_TOO_BIG
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("offer", "answer"),
    [
        ("permessage-deflate", ""),
        ("permessage-deflate; client_max_window_bits", "client_max_window_bits=15"),
        (
            "permessage-deflate; server_no_context_takeover; server_max_window_bits=10",
            "server_no_context_takeover; server_max_window_bits=10",
        ),
        ("permessage-deflate; server_max_window_bits=8", None),
        ("permessage-deflate; server_max_window_bits", None),
        ("permessage-deflate; client_max_window_bits=no", None),
        ("permessage-deflate; client_max_window_bits=16", None),
        ("permessage-deflate; client_no_context_takeover=1", None),
        ("permessage-deflate; client_no_context_takeover; client_no_context_takeover", None),
        ("permessage-deflate; unknown", None),
    ],
)
def test_offers_that_are_not_valid_are_declined(offer: str, answer: str | None) -> None:
    extension = BoundedDeflate(LIMIT_BYTES)
    assert extension.accept(offer) == answer
    assert extension.enabled() == (answer is not None)
    if answer is not None:
        assert extension.accept("permessage-deflate") is None  # the first offer that is valid counts
