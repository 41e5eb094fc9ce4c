from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http_harness import poll_for
from tables import each_case

from daskserve.errors import BodyTooLargeError
from daskserve.options.http import HTTPOptions
from daskserve.proxies.exchange.limits.limits import Limits
from daskserve.proxies.exchange.request.body import HIGH_WATER_BYTES, SMALL_BYTES, RequestBody

END = {"type": "http.request", "body": b"", "more_body": False}


async def test_a_request_without_a_body_is_one_empty_message_and_then_silence_until_the_end() -> None:
    body = RequestBody(is_ended=True)
    assert await body.receive() == END
    waiting = asyncio.create_task(body.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    body.close()
    assert await waiting == {"type": "http.disconnect"}
    assert await body.receive() == {"type": "http.disconnect"}


async def test_the_last_chunk_says_so_if_the_end_is_known_by_then() -> None:
    body = RequestBody(is_ended=False)
    body.feed(b"one")
    body.feed(b"two")
    assert await body.receive() == {"type": "http.request", "body": b"one", "more_body": True}
    body.end()
    assert await body.receive() == {"type": "http.request", "body": b"two", "more_body": False}


async def test_an_end_that_comes_late_is_a_message_of_its_own() -> None:
    body = RequestBody(is_ended=False)
    body.feed(b"one")
    assert (await body.receive())["more_body"]
    waiting = asyncio.create_task(body.receive())
    await asyncio.sleep(0)
    body.end()
    assert await waiting == END


async def test_receivers_may_be_cancelled_without_harm_to_others() -> None:
    body = RequestBody(is_ended=False)
    first = asyncio.create_task(body.receive())
    second = asyncio.create_task(body.receive())
    await asyncio.sleep(0)
    first.cancel()
    body.feed(b"data")
    assert (await second)["body"] == b"data"
    await asyncio.wait([first])


async def test_a_full_buffer_asks_to_wait_until_half_of_it_was_taken() -> None:
    body = RequestBody(is_ended=False)
    quarter = bytes(HIGH_WATER_BYTES // 4)
    for _ in range(4):
        assert body.feed(quarter) is None
    room = body.feed(quarter)
    assert room is not None
    for _ in range(2):
        await body.receive()
        assert not room.done()
    await body.receive()
    assert room.done()


async def test_closing_resumes_the_socket_and_drops_further_data() -> None:
    body = RequestBody(is_ended=False)
    room = body.feed(bytes(HIGH_WATER_BYTES + 1))
    assert room is not None
    body.close()
    await poll_for(room.done)
    assert body.feed(bytes(HIGH_WATER_BYTES + 1)) is None
    assert body.received_bytes == 2 * (HIGH_WATER_BYTES + 1)
    assert await body.receive() == {"type": "http.disconnect"}


# ---- whole bodies, and their limits


def limited(**options: Any) -> Limits:
    return Limits(HTTPOptions(**options))


async def test_a_gathered_body_is_one_message_and_never_pauses_the_client() -> None:
    body = RequestBody(is_ended=False)
    assert body.feed(b"a" * HIGH_WATER_BYTES) is None
    room = body.feed(b"b")
    assert room is not None
    gathering = asyncio.create_task(body.gather())
    await asyncio.sleep(0)
    assert room.done()
    for _ in range(5):
        assert body.feed(b"c" * HIGH_WATER_BYTES) is None
    assert not gathering.done()
    body.end()
    await gathering
    whole = b"a" * HIGH_WATER_BYTES + b"b" + b"c" * 5 * HIGH_WATER_BYTES
    assert await body.receive() == {"type": "http.request", "body": whole, "more_body": False}


async def test_gathering_ends_with_the_client() -> None:
    limits = limited()
    body = RequestBody(is_ended=False)
    body.expect(None, 1000, limits)
    gathering = asyncio.create_task(body.gather())
    await asyncio.sleep(0)
    body.feed(b"x" * 100)
    assert limits.received.used_bytes == 100
    body.close()
    await gathering
    assert limits.received.used_bytes == 0
    assert await body.receive() == {"type": "http.disconnect"}


async def test_a_dropped_body_keeps_nothing_and_is_empty() -> None:
    limits = limited()
    body = RequestBody(is_ended=False)
    body.expect(None, 1000, limits)
    body.feed(b"one")
    gathering = asyncio.create_task(body.gather(drops=True))
    await asyncio.sleep(0)
    body.feed(b"two")
    assert limits.received.used_bytes == 0
    body.end()
    await gathering
    assert await body.receive() == END


async def test_parts_count_until_they_are_taken_and_a_whole_body_until_the_request_ends() -> None:
    limits = limited()
    parts, whole = RequestBody(is_ended=False), RequestBody(is_ended=False)
    for body in (parts, whole):
        body.expect(20, 1000, limits)
        body.feed(b"0123456789")
    assert limits.received.used_bytes == 20
    await parts.receive()
    assert limits.received.used_bytes == 10
    whole.end()
    await whole.gather()
    await whole.receive()
    assert limits.received.used_bytes == 10
    whole.close()
    assert limits.received.used_bytes == 10
    whole.release()
    parts.feed(b"more")
    parts.close()
    assert limits.received.used_bytes == 0
    parts.feed(b"late")
    assert limits.received.used_bytes == 0


def test_a_body_beyond_the_budget_is_a_503_unless_it_is_small() -> None:
    limits = limited(max_buffered_bytes=SMALL_BYTES + 10)
    first, second, small = (RequestBody(is_ended=False) for _ in range(3))
    for body in (first, second, small):
        body.expect(None, 1 << 20, limits)
    first.feed(bytes(SMALL_BYTES))
    small.feed(bytes(100))
    assert small.excess is first.excess is None
    second.feed(bytes(SMALL_BYTES + 1))
    assert second.excess is not None
    status, text, headers = second.excess
    assert (status, list(headers)) == (503, [(b"retry-after", b"1")])
    assert "max_buffered_bytes" in text


@each_case("length", [11, None])
def test_a_body_beyond_its_backends_limit_is_a_413(length: int | None) -> None:
    limits = limited()
    body = RequestBody(is_ended=False)
    body.expect(length, 1000, limits)
    body.feed(b"0123456789")
    body.limit_to(20)
    if length is None:
        body.feed(b"x")
    with pytest.raises(BodyTooLargeError, match="10 bytes"):
        body.limit_to(10)
    assert limits.hits["max_body_bytes"] == 1


def test_the_default_budget_is_eight_bodies() -> None:
    assert limited().received.size_bytes == 512 << 20
    assert limited(max_body_bytes=1 << 30).received.size_bytes == 8 << 30
    assert limited(max_body_bytes=1).received.size_bytes == 64 << 20
    assert limited(max_buffered_bytes=7).received.size_bytes == 7
