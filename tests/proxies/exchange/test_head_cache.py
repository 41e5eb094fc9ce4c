"""Heads of whole responses that are written once a second, and those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from daskserve.common.types import WHOLE_RESPONSE, Message
from daskserve.proxies.asgi import split_whole
from daskserve.proxies.exchange import response_head as http1
from daskserve.proxies.exchange.response_head import DateHeader, HeadCache, ResponseWriter

TEXT = ((b"content-type", b"text/plain"),)


class Clock:
    """A clock in the hand of the test: what it shows, and how far the wall's is from that."""

    def __init__(self) -> None:
        self.shown = 100.0
        self.wall_offset_s = 0.25

    def now(self) -> float:
        return self.shown

    def wall(self) -> float:
        return self.shown + self.wall_offset_s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError


def whole(body: bytes = b"hi", *, status: Any = 200, headers: Any = TEXT, **more: Any) -> Message:
    return {"type": WHOLE_RESPONSE, "status": status, "headers": headers, "body": body, **more}


def named(*args: Any, **fields: Any) -> Message:
    return whole(*args, request_id=b"an-id", **fields)


def make_cache() -> HeadCache:
    return HeadCache(DateHeader(Clock()))


def slowly(message: Message, date: bytes) -> bytes:
    """Return what the writer makes of the two messages of ASGI."""
    start, body = split_whole(message)
    writer = ResponseWriter(start, method="GET", is_http11=True, closes=False)
    written = b"".join(writer.first(body["body"], False, date))
    assert not writer.closes
    return written


def parts_of(written: bytes) -> tuple[bytes, list[bytes], bytes]:
    """Return the status line, the other lines in the order of their names, and the body."""
    head, _, body = written.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return status, sorted(lines), body


DATE = b"date: Thu, 01 Jan 1970 00:01:40 GMT"


@pytest.mark.parametrize(
    "message",
    [
        named(),
        named(b""),
        named(b"x" * 999),
        named(b"x" * 1000),
        named(b"\r\n\r\n"),
        named(headers=()),
        named(status=404),
        named(status=500),
        named(status=205),
        named(headers=((b"Content-Type", b"a/b"), (b"X-A", b"1"), (b"x-a", b"2"), (b"set-cookie", b"a=b"))),
        named(headers=tuple((b"x-%d" % number, b"v" * 128) for number in range(8))),
    ],
)
def test_cached_heads_have_the_same_bytes_as_uncached_ones(message: Message) -> None:
    cache = make_cache()
    first, second = cache.write(message), cache.write(message)
    assert first == second is not None
    assert first is not None
    assert parts_of(first) == parts_of(slowly(message, DATE))


@pytest.mark.parametrize(
    "message",
    [
        # 1. It has no request id.
        whole(),
        # 2. The headers cannot be looked up.
        named(headers=list(TEXT)),
        named(headers=([b"content-type", b"a/b"],)),
        named(headers=((b"content-type", bytearray(b"a/b")),)),
        # 3. They are the connection's, or their own in each response, in whatever case.
        *(
            named(headers=(*TEXT, (name, b"1")))
            for name in (
                b"connection",
                b"Content-Length",
                b"date",
                b"Transfer-Encoding",
                b"X-Request-ID",
            )
        ),
        # 4. They are too many, or too long.
        named(headers=tuple((b"x-%d" % number, b"1") for number in range(9))),
        named(headers=((b"x-a", b"v" * 129),)),
        named(headers=((b"x" * 129, b"v"),)),
        # 5. The status is not known, or that of no response, or of one without a body.
        *(named(status=status) for status in (0, 100, 199, 204, 304, 299, 1000, -1)),
        # 6. It would end the head, or be read as two lines.
        *(
            named(headers=((b"x-a", b"1"), header))
            for control in (b"\r", b"\n", b"\r\n", b"\0")
            for header in ((b"x-b", b"1" + control + b"2"), (b"x" + control + b"b", b"1"))
        ),
    ],
)
def test_uncacheable_heads_are_written_header_by_header(message: Message) -> None:
    cache = make_cache()
    assert cache.write(message) is None
    assert cache.write(message) is None
    # It does no harm to those that can be.
    assert cache.write(named()) is not None


def test_statuses_that_are_equal_are_the_same() -> None:
    import http

    cache = make_cache()
    assert cache.write(named(status=http.HTTPStatus.OK)) == cache.write(named(status=200))


def test_each_response_has_its_own_id_length_and_body() -> None:
    cache = make_cache()
    written = [
        cache.write(whole(body, request_id=request_id))
        for body, request_id in ((b"one", b"1"), (b"fourteen bytes", b"2"), (b"", b"3"))
    ]
    found = [parts_of(each or b"") for each in written]
    assert [body for _, _, body in found] == [b"one", b"fourteen bytes", b""]
    for number, (length, (_, lines, _)) in enumerate(zip((3, 14, 0), found, strict=True)):
        assert b"content-length: %d" % length in lines
        assert b"x-request-id: %d" % (number + 1) in lines
        assert len(lines) == 4


def test_each_second_has_its_own_date() -> None:
    clock = Clock()
    cache = HeadCache(DateHeader(clock))

    def date() -> bytes:
        written = cache.write(named())
        assert written is not None
        (found,) = (line for line in parts_of(written)[1] if line.startswith(b"date: "))
        return found[-12:]

    assert date() == b"00:01:40 GMT"
    clock.shown += 0.74
    assert date() == b"00:01:40 GMT"
    clock.shown += 0.02  # the wall's second ends before that of the clock that only goes forward
    assert date() == b"00:01:41 GMT"
    clock.shown += 60
    assert date() == b"00:02:41 GMT"
    clock.wall_offset_s += 3600  # the wall's clock was set
    assert date() == b"00:02:41 GMT"
    clock.shown += 1
    assert date() == b"01:02:42 GMT"


def test_the_cache_is_bounded_and_holds_no_large_heads() -> None:
    clock = Clock()
    cache = HeadCache(DateHeader(clock))
    limit = http1._MAX_HEADS

    def write(number: int) -> bytes | None:
        return cache.write(named(headers=((b"x-n", b"%d" % number),)))

    large = [named(headers=((b"x-large", b"%1000d" % number),)) for number in range(3)]
    assert [cache.write(each) for each in large] == [None] * 3
    assert len(cache._heads) == 0
    for number in range(limit):
        assert write(number) is not None
    # What is there is used, what is not is written otherwise.
    assert write(limit) is None
    assert write(0) is not None
    assert len(cache._heads) == limit
    # In the next second there is room again, and nothing of the last is left.
    clock.shown += 1
    assert write(limit) is not None
    assert len(cache._heads) == 1
