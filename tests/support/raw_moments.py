"""Cases of `raw_cases` about huge, slow and early data."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz_requests import IDLE_S, MAX_BODY_BYTES, SMUGGLED
from raw_cases import CHUNKED, HANDSHAKE, MAX_HEADER_BYTES, MAX_HEADERS, RawCase, head, refused, served, shown


def huge() -> Iterator[RawCase]:
    seen = (b"POST /echo", b"")
    room = MAX_HEADER_BYTES - len(head(b"X: "))
    yield served("a head of the maximum size", head(b"X: " + b"y" * room), seen)
    yield refused("a head one byte larger", head(b"X: " + b"y" * (room + 1)), 431)
    yield refused("a head of twice the size", head(b"X: " + b"y" * 2 * room), 431)
    yield refused(
        "a target larger than a head", head(first=b"GET /%b HTTP/1.1" % (b"a" * MAX_HEADER_BYTES)), 431
    )
    yield refused("a method larger than a head", b"A" * 200_000, 431)
    yield refused("a header name larger than a head", head(b"X" * MAX_HEADER_BYTES + b": y"), 431)
    yield refused("zeros", b"\0" * 70_000, 431)
    lines = [b"X: y"] * (MAX_HEADERS - 1)
    yield served("as many headers as are allowed", head(*lines), seen)
    yield refused("one header more", head(*lines, b"X: y"), 431)
    yield refused("ten thousand headers", head(*[b"a:"] * 10_000), 431)
    yield refused("ten thousand different headers", head(*[b"%x:" % number for number in range(10_000)]), 431)
    yield refused("more headers than a head has room for", head(*[b"X: yyy"] * 20_000), 431)
    yield refused(
        "one header more after a good request, in HEAD", head(*lines, b"X: y", first=b"HEAD / HTTP/1.1"), 431
    )
    body = b"z" * MAX_BODY_BYTES
    length = b"Content-Length: %d"
    yield served("a body of the maximum size", head(length % len(body)) + body, (b"POST /echo", body))
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    yield served("chunks of the maximum size", head(CHUNKED) + chunk + b"0\r\n\r\n", (b"POST /echo", body))
    # The server reads and drops the rest of the body, so that the response arrives.
    data = head(length % (len(body) + 1)) + body + b"z"
    yield refused("a body one byte larger", data, 413)
    data = head(length % (10 * len(body))) + body * 10
    yield refused("a body ten times larger", data, 413)
    for size in (len(body) + 1, 10 * len(body), 1 << 20):
        chunk = b"%x\r\n%b\r\n" % (size, b"z" * size)
        data = head(CHUNKED) + chunk + b"0\r\n\r\n" + SMUGGLED
        stops = ((len(head(CHUNKED)), 0.0),)
        yield RawCase(f"a chunk of {size} bytes", data, (413,), ((b"POST /echo", None),), stops)
    yield RawCase("a body of 18 digits", head(length % (10**18 - 1)) + SMUGGLED, (413,), is_closed=False)


def slow() -> Iterator[RawCase]:
    echo, hi = b"POST /echo", b"Content-Length: 2"
    for data in (
        b"", b"\r\n", b"G", b"GET /ec", b"GET /echo HTTP/1.1", b"GET /echo HTTP/1.1\r",
        b"GET /echo HTTP/1.1\r\n",
        b"GET /echo HTTP/1.1\r\nHo", head()[:-1], head()[:-2], head()[:-3], b"\x16\x03\x01\x02\0\x01",
    ):  # fmt: skip
        yield RawCase(f"nothing after {shown(data)}", data, (), is_closed=False)
    for start in (
        head(b"Content-Length: 9"), head(b"Content-Length: 9") + b"hi", head(CHUNKED), head(CHUNKED) + b"2",
        head(CHUNKED) + b"2\r", head(CHUNKED) + b"2\r\n", head(CHUNKED) + b"2\r\nh",
        head(CHUNKED) + b"2\r\nhi", head(CHUNKED) + b"2\r\nhi\r", head(CHUNKED) + b"2\r\nhi\r\n",
        head(CHUNKED) + b"2\r\nhi\r\n0\r\n",
        head(CHUNKED) + b"2\r\nhi\r\n0\r\nX: y", head(CHUNKED) + b"2\r\nhi\r\n0\r\nX: y\r\n\r",
    ):  # fmt: skip
        yield RawCase(f"nothing after {shown(start[36:])}", start, (), ((echo, None),), is_closed=False)
    for path in (b"stream", b"fixed"):
        start = head(b"Content-Length: 9", first=b"POST /%b HTTP/1.1" % path) + b"hi"
        seen = ((b"POST /" + path, None),)
        yield RawCase(
            f"nothing after a part of a body for {shown(path)}",
            start,
            (200,),
            seen,
            is_closed=False,
            is_cut=True,
        )
    half = RawCase(
        "half a request after a whole one", head() + head()[:20], (200,), ((echo, b""),), is_closed=False
    )
    yield half
    yield RawCase("nothing after a whole request", head(), (200,), ((echo, b""),), is_closed=False)
    for name, data in (
        ("a head", head()), ("a body", head(hi) + b"hi"),
        ("chunks", head(CHUNKED) + b"2;a\r\nhi\r\n0\r\nX: y\r\n\r\n"),
    ):  # fmt: skip
        body = b"" if name == "a head" else b"hi"
        case = served(f"{name} byte by byte", data, (echo, body))
        yield RawCase(
            case.name, case.data, case.statuses, case.seen, tuple((end, 0.0) for end in range(len(data)))
        )
    stops = tuple((end, 0.0) for end in range(len(head())))
    yield RawCase("nothing after a head byte by byte", head(), (200,), ((echo, b""),), stops, is_closed=False)
    stops = tuple((end, 0.3 * IDLE_S) for end in range(4, 34, 5))
    yield RawCase("a head that takes longer than the idle limit", head() + SMUGGLED, (), stops=stops)
    case = served(
        "a body that takes longer than the idle limit",
        head(b"Content-Length: 6") + b"sixsix",
        (echo, b"sixsix"),
    )
    stops = tuple((len(head(b"Content-Length: 6")) + end, 0.6 * IDLE_S) for end in range(6))
    yield RawCase(case.name, case.data, case.statuses, case.seen, stops)
    start = head(b"Content-Length: 6", first=b"POST /stream HTTP/1.1")
    case = served("a body that is answered as slowly", start + b"sixsix", (b"POST /stream", b"sixsix"))
    stops = tuple((len(start) + end, 0.6 * IDLE_S) for end in range(6))
    yield RawCase(case.name, case.data, case.statuses, case.seen, stops)
    for byte in (b"\n", b"\0\r\n"):
        data = b"GET /echo HTTP/1.1" + byte
        yield RawCase(
            f"no more than {shown(data)}", data, (400,) if byte == b"\n" else (), is_closed=byte == b"\n"
        )


def early() -> Iterator[RawCase]:
    early, fixed, stream = ((b"POST /" + name, None) for name in (b"early", b"fixed", b"stream"))
    first = b"POST /early HTTP/1.1"
    length = b"Content-Length: 5"
    start = head(length, first=first)
    yield served("a response before a body that is there", start + b"hello", early)
    late = served("a response before the body", start + b"hello", early)
    yield RawCase(late.name, late.data, late.statuses, late.seen, ((len(start), 0.0),))
    late = served("a response within the body", start + b"hello", early)
    yield RawCase(late.name, late.data, late.statuses, late.seen, ((len(start) + 2, 0.0),))
    chunked = head(CHUNKED, first=first)
    late = served("a response within chunks", chunked + b"2\r\nhi\r\n0\r\n\r\n", early)
    yield RawCase(late.name, late.data, late.statuses, late.seen, ((len(chunked) + 2, 0.0),))
    yield RawCase("a response, and no body", start, (200,), (early,), is_closed=False)
    yield RawCase("a response, and half a body", start + b"he", (200,), (early,), is_closed=False)
    bad = chunked + b"2\r\nhi\r\nzz\r\n" + SMUGGLED
    yield RawCase("a response, and malformed chunks", bad, (200,), (early,), ((len(chunked), 0.0),))
    for name, seen, ending in (
        (b"fixed", fixed, b"zz\r\n"),
        (b"stream", stream, b"zz\r\n"),
        (b"fixed", fixed, b"2\r\nhi\rX"),
    ):
        start = head(CHUNKED, first=b"POST /%b HTTP/1.1" % name) + b"2\r\nhi\r\n"
        yield RawCase(
            f"{shown(ending)} within the response of {shown(name)}",
            start + ending + SMUGGLED,
            (200,),
            (seen,),
            ((len(start), 0.0),),
            is_cut=True,
        )
    start = head(CHUNKED, first=b"POST /stream HTTP/1.1") + b"2\r\nhi\r\n"
    chunk = b"2000\r\n" + b"z" * 0x2000 + b"\r\n0\r\n\r\n" + SMUGGLED
    stops = ((len(start), 0.0),)
    yield RawCase(
        "a chunk that is too large within a response", start + chunk, (200,), (stream,), stops, is_cut=True
    )
    yield refused(
        "a refused head before a large body", head(b"Content-Length: 300000", b"X") + b"z" * 300_000
    )
    yield refused("a head that is too large, and goes on", head(b"X: " + b"y" * 1_000_000), 431)
    yield refused("a refused line before a large body", b"\n" + b"z" * 1_000_000)
    expect = b"Expect: 100-continue"
    yield served("100-continue", head(expect, length) + b"hello", (b"POST /echo", b"hello"))
    yield served("100-Continue", head(b"Expect: 100-Continue", length) + b"hello", (b"POST /echo", b"hello"))
    yield served(
        "another expectation", head(b"Expect: wonders", length) + b"hello", (b"POST /echo", b"hello")
    )
    yield served("100-continue and no body", head(expect), (b"POST /echo", b""))
    data = head(expect, length, b"Connection: keep-alive", first=b"POST /echo HTTP/1.0") + b"hello"
    yield served("100-continue in HTTP/1.0", data, (b"POST /echo", b"hello"))
    yield RawCase(
        "100-continue for a body that is not read", head(expect, length, first=first), (200,), (early,)
    )
    yield refused("100-continue for a body that is too large", head(expect, b"Content-Length: 5000"), 413)
    data = head(expect, CHUNKED) + b"zz\r\n" + SMUGGLED
    stops = ((len(head(expect, CHUNKED)), 0.0),)
    yield RawCase("100-continue for malformed chunks", data, (400,), ((b"POST /echo", None),), stops)
    get = b"GET /socket HTTP/1.1"
    yield refused(
        "the handshake of a WebSocket with a body", head(*HANDSHAKE, b"Content-Length: 2", first=get) + b"hi"
    )
    data = head(*HANDSHAKE, CHUNKED, first=get) + b"2\r\nhi\r\n0\r\n\r\n"
    yield refused("the handshake of a WebSocket with chunks", data)
    yield refused("the handshake of a WebSocket without a key", head(*HANDSHAKE[:3], first=get))


#: The cases by family.
FAMILIES = (
    huge,
    slow,
    early,
)
