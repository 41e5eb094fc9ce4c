"""Compression of WebSocket messages, under both servers."""

from __future__ import annotations

import asyncio
import tracemalloc
import zlib
from contextlib import suppress
from typing import Any

import pytest
from http_harness import advance, hits, serving
from tables import each_case
from test_websocket import Echo, client_of
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Pong
from wsproto.events import Message as DataMessage
from wsproto.extensions import PerMessageDeflate
from wsproto.frame_protocol import FrameDecoder, Opcode, RsvBits

from daskserve.common.types import Receive, Send
from daskserve.proxies.asgi import Scope
from daskserve.proxies.exchange.limits.limits import FREE_BYTES, InflationRules
from daskserve.proxies.exchange.limits.loop_work import SLICE_BYTES
from daskserve.proxies.exchange.websocket.deflate import Inflation, MessageDeflate

pytestmark = pytest.mark.smoke

LIMIT_BYTES = 100_000
TEXT = "all work and no play " * 1000


def compressed(data: bytes) -> bytes:
    """Return the bytes that a client sends for a message."""
    deflate = zlib.compressobj(wbits=-15)
    return (deflate.compress(data) + deflate.flush(zlib.Z_SYNC_FLUSH))[:-4]


def frame(data: bytes, *, opcode: Opcode) -> bytes:
    """Return a frame with a small compressed message, masked with zeros."""
    return bytes([0xC0 | opcode, 0x80 | len(data)]) + bytes(4) + data


@each_case("is_on", [True, False])
async def test_messages_are_compressed_if_both_sides_want_it(is_on: bool) -> None:
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


async def test_a_client_that_does_not_offer_it_gets_plain_messages() -> None:
    async with serving(Echo(), websocket_compression=True) as server, client_of(server) as client:
        assert (await client.open()).extensions == []
        assert await client.text(TEXT) == TEXT


@each_case("sizes", [[LIMIT_BYTES + 1], [LIMIT_BYTES - 1, 2]])
async def test_the_size_limit_holds_for_what_a_message_becomes(sizes: list[int]) -> None:
    options: dict[str, Any] = {"websocket_compression": True, "max_websocket_message_bytes": LIMIT_BYTES}
    async with serving(Echo(), **options) as server, client_of(server) as client:
        await client.open(extensions=[PerMessageDeflate()])
        for _ in range(2):
            assert await client.text("x" * LIMIT_BYTES) == "x" * LIMIT_BYTES
        for size in sizes:
            await client.send(DataMessage(data="x" * size, message_finished=size == sizes[-1]))
        assert (await client.closed())[0] == 1009
        assert hits(server) == {"max_websocket_message_bytes": 1}


async def test_data_that_is_not_compressed_properly_closes_the_connection() -> None:
    async with serving(Echo(), websocket_compression=True) as server, client_of(server) as client:
        await client.open(extensions=[PerMessageDeflate()])
        await client.send_raw(b"\xc1\x84\0\0\0\0\xff\xff\xff\xff")  # a compressed text, masked with zeros
        assert (await client.closed())[0] == 1007


async def test_text_that_is_not_utf8_closes_the_connection() -> None:
    async with serving(Echo(), websocket_compression=True) as server, client_of(server) as client:
        await client.open(extensions=[PerMessageDeflate()])
        await client.send_raw(frame(compressed(b"\xc3"), opcode=Opcode.TEXT))
        assert (await client.closed())[0] == 1007


async def test_a_message_may_end_its_deflate_stream() -> None:
    """The example of RFC 7692, 7.2.3.4. The next message begins a new stream."""

    async with serving(Echo(), websocket_compression=True) as server, client_of(server) as client:
        await client.open(extensions=[PerMessageDeflate()])
        for _ in range(2):
            await client.send_raw(frame(bytes.fromhex("f348cdc9c9070000"), opcode=Opcode.TEXT))
            assert await client.message() == "Hello"


async def test_a_message_that_grows_more_than_the_ratio_is_refused() -> None:
    options: dict[str, Any] = {"websocket_compression": True, "max_websocket_inflation_ratio": 200}
    async with serving(Echo(), **options) as server, client_of(server) as client:
        await client.open(extensions=[PerMessageDeflate()])
        small = "x" * FREE_BYTES  # grows a thousand times, too
        assert await client.text(small) == small
        many = "".join(map(str, range(500_000)))  # three times
        assert await client.text(many) == many
        await client.send(DataMessage(data="x" * (FREE_BYTES + SLICE_BYTES)))
        assert (await client.closed())[0] == 1009
        assert hits(server) == {"max_websocket_inflation_ratio": 1}


async def test_many_messages_that_grow_more_than_the_rate_are_refused() -> None:
    options: dict[str, Any] = {
        "websocket_compression": True,
        "max_websocket_message_bytes": LIMIT_BYTES,
        "max_websocket_inflation_per_s": LIMIT_BYTES,
    }
    app = Echo()
    async with (
        serving(app, **options) as server,
        client_of(server) as usual,
        client_of(server) as client,
    ):
        await usual.open(extensions=[PerMessageDeflate()])
        await client.open(extensions=[PerMessageDeflate()])
        text = "".join(map(str, range(10_000)))
        for _ in range(20):
            assert await usual.text(text) == text
        for _ in range(4):
            await client.text("x" * LIMIT_BYTES)
        advance(2)
        for _ in range(2):
            await client.text("x" * LIMIT_BYTES)
        await client.send(DataMessage(data="x" * LIMIT_BYTES))
        assert (await client.closed())[0] == 1008
        assert hits(server) == {"max_websocket_inflation_per_s": 1}
        assert await usual.text(text) == text


async def test_large_messages_are_compressed_in_pieces_that_do_not_mix() -> None:
    texts = [name * (5 * SLICE_BYTES) for name in "abc"]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await asyncio.gather(*[send({"type": "websocket.send", "text": text}) for text in texts])
        assert (await receive())["type"] == "websocket.disconnect"

    async with serving(app, websocket_compression=True) as server, client_of(server) as client:
        await client.open(extensions=[PerMessageDeflate()])
        assert [await client.message() for _ in texts] == texts


@each_case("is_cancelled", [True, False])
async def test_a_message_that_is_not_sent_whole_closes_the_connection(is_cancelled: bool) -> None:
    """The next message would become a part of the incomplete one."""
    text = "a" * (9 * SLICE_BYTES) + ("" if is_cancelled else "\ud800")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        sending = asyncio.ensure_future(send({"type": "websocket.send", "text": text}))
        await asyncio.sleep(0)
        if is_cancelled:
            sending.cancel()
        await asyncio.wait([sending])
        assert is_cancelled or isinstance(sending.exception(), UnicodeEncodeError)
        with suppress(OSError):
            await send({"type": "websocket.send", "text": "another"})
        assert (await receive())["type"] == "websocket.disconnect"

    async with serving(app, websocket_compression=True) as server, client_of(server) as client:
        await client.open(extensions=[PerMessageDeflate()])
        while not isinstance(event := await client.event(), CloseConnection):
            assert not event.message_finished
        assert event.code == 1011


def test_a_step_never_becomes_more_than_a_slice() -> None:
    extension = MessageDeflate()
    assert extension.accept("permessage-deflate") == ""
    extension.frame_inbound_header(
        FrameDecoder(client=False), Opcode.BINARY, RsvBits(True, False, False), 65536
    )
    inflation = Inflation(extension, InflationRules())
    bomb = BytesMessage(data=bytearray(compressed(bytes(64 << 20))))
    tracemalloc.start()
    try:
        sizes = [len(part.data) for part in inflation.parts(bomb, 0.0)]
        assert sum(sizes) == 64 << 20
        assert max(sizes) == SLICE_BYTES
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@each_case(
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
    extension = MessageDeflate()
    assert extension.accept(offer) == answer
    assert extension.enabled() == (answer is not None)
    if answer is not None:
        assert extension.accept("permessage-deflate") is None  # the first offer that is valid counts
