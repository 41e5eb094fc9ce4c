from __future__ import annotations

from typing import Any

import pytest
from tables import each_case

from daskserve.common.clock import LoopClock
from daskserve.proxies.exchange.response.head import DateHeader, HeadCache, ResponseWriter

DATE = b"date: Thu, 01 Jan 1970 00:00:00 GMT"
Headers = list[tuple[bytes, bytes]]


class FixedClock(LoopClock):
    def now(self) -> float:
        return 0.0


def write(
    *bodies: bytes,
    status: Any = 200,
    headers: Headers | None = None,
    method: str = "GET",
    is_http11: bool = True,
    closes: bool = False,
    is_last: bool = True,
) -> tuple[list[bytes], bytes, bool]:
    """Return the header lines without the date, the bytes after them, and whether the connection ends."""
    start = {"type": "http.response.start", "status": status, "headers": headers or []}
    writer = ResponseWriter(start, method=method, is_http11=is_http11, closes=closes)
    data = b""
    for index, body in enumerate(bodies):
        more_body = not is_last or index < len(bodies) - 1
        parts = writer.next(body, more_body) if index else writer.first(body, more_body, DATE)
        data += b"".join(parts)
    head, _, rest = data.partition(b"\r\n\r\n")
    return [line for line in head.split(b"\r\n") if line != DATE], rest, writer.closes


@each_case(
    ("case", "head", "rest", "closes"),
    [
        # 1. One message, so its length is known.
        ({}, [b"HTTP/1.1 200 OK", b"content-length: 2"], b"hi", False),
        # 2. Several messages to a client that supports chunks.
        (
            {"bodies": (b"hi", b"", b"you")},
            [b"HTTP/1.1 200 OK", b"transfer-encoding: chunked"],
            b"2\r\nhi\r\n3\r\nyou\r\n0\r\n\r\n",
            False,
        ),
        # 3. Several messages to a client that does not.
        (
            {"bodies": (b"hi", b"you"), "is_http11": False},
            [b"HTTP/1.1 200 OK", b"connection: close"],
            b"hiyou",
            True,
        ),
        # 4. The application knows the length.
        (
            {"bodies": (b"hi", b"you"), "headers": [(b"Content-Length", b"5")]},
            [b"HTTP/1.1 200 OK", b"content-length: 5"],
            b"hiyou",
            False,
        ),
        # 5. HEAD: the headers of GET, but no body.
        ({"method": "HEAD"}, [b"HTTP/1.1 200 OK", b"content-length: 2"], b"", False),
        ({"method": "HEAD", "bodies": (b"",)}, [b"HTTP/1.1 200 OK"], b"", False),
        ({"method": "HEAD", "bodies": (b"hi", b"you")}, [b"HTTP/1.1 200 OK"], b"", False),
        (
            {"method": "HEAD", "bodies": (b"",), "headers": [(b"content-length", b"9")]},
            [b"HTTP/1.1 200 OK", b"content-length: 9"],
            b"",
            False,
        ),
        # 6. Statuses without a body.
        ({"status": 204, "headers": [(b"content-length", b"2")]}, [b"HTTP/1.1 204 No Content"], b"", False),
        (
            {"status": 304, "bodies": (b"",), "headers": [(b"content-length", b"9")]},
            [b"HTTP/1.1 304 Not Modified", b"content-length: 9"],
            b"",
            False,
        ),
        # 7. The connection.
        (
            {"closes": True},
            [b"HTTP/1.1 200 OK", b"content-length: 2", b"connection: close"],
            b"hi",
            True,
        ),
        (
            {"headers": [(b"connection", b"Close")]},
            [b"HTTP/1.1 200 OK", b"content-length: 2", b"connection: close"],
            b"hi",
            True,
        ),
        (
            {"is_http11": False},
            [b"HTTP/1.1 200 OK", b"content-length: 2", b"connection: keep-alive"],
            b"hi",
            False,
        ),
        # 8. The server sets the framing headers; the application sets all others.
        (
            {"headers": [(b"transfer-encoding", b"chunked"), (b"X-A", b"1"), (b"x-a", b"2")]},
            [b"HTTP/1.1 200 OK", b"x-a: 1", b"x-a: 2", b"content-length: 2"],
            b"hi",
            False,
        ),
        ({"status": 299}, [b"HTTP/1.1 299 ", b"content-length: 2"], b"hi", False),
    ],
)
def test_a_response_on_the_wire(case: dict[str, Any], head: list[bytes], rest: bytes, closes: bool) -> None:
    bodies = case.pop("bodies", (b"hi",))
    assert write(*bodies, **case) == (head, rest, closes)


def test_a_head_without_a_body_part_can_go_out_at_once() -> None:
    head, rest, _ = write(b"", is_last=False)
    assert (head, rest) == ([b"HTTP/1.1 200 OK", b"transfer-encoding: chunked"], b"")


def test_the_date_is_the_applications_if_it_sets_one() -> None:
    start = {"status": 200, "headers": [(b"date", b"yesterday")]}
    writer = ResponseWriter(start, method="GET", is_http11=True, closes=False)
    assert bytes(writer.first(b"", False, DATE)[0]).count(b"date: ") == 1


@each_case(
    "case",
    [
        {"status": 100},
        {"status": "200"},
        {"headers": [(b"x-a", b"1\r\nx-b: 2")]},
        {"headers": [(b"x-a\n", b"1")]},
        {"headers": [(b"x-a", b"1\x00")]},
        {"headers": [("x-a", "text")]},
        {"headers": [(b"content-length", b"1")]},
        {"headers": [(b"content-length", b"3")]},
        {"headers": [(b"content-length", b"-2")]},
        {"headers": [(b"content-length", b"2"), (b"content-length", b"3")]},
    ],
)
def test_a_head_that_http_cannot_carry_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        write(b"hi", **case)


@each_case("header", [("x-a", b"1"), (b"x-a", 1)])
def test_an_error_names_the_header_that_is_not_bytes(header: Any) -> None:
    text = f"{header[0]!r}: {header[1]!r}"
    with pytest.raises(TypeError, match=text):
        write(b"hi", headers=[(b"a", b"b"), header])
    with pytest.raises(TypeError, match=text):
        HeadCache(DateHeader(FixedClock())).write(
            {"status": 200, "headers": ((b"a", b"b"), header), "body": b"hi"}, b"1"
        )


@each_case("bodies", [(b"hi", b"you!"), (b"hi", b"yo")])
def test_a_body_that_breaks_its_promised_length_is_refused(bodies: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match="content-length"):
        write(*bodies, headers=[(b"content-length", b"5")])
