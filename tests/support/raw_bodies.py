"""Cases of `raw_cases` about the end of a request."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz_requests import SMUGGLED
from raw_cases import CHUNKED, RawCase, head, refused, served, shown


def transfer_encodings() -> Iterator[RawCase]:
    end = b"0\r\n\r\n"
    for value in (
        b"xchunked", b"chunkedx", b"chunked;q=1", b"chunked, chunked", b"chunked,chunked", b"gzip, chunked",
        b"chunked, gzip", b"chunked, identity", b"identity", b"identity, chunked", b"deflate", b"",
        b",chunked",
        b"chunked,", b"\x0bchunked", b"\x0cchunked", b"chunked\x0b", b"chunked\0", b"\0chunked",
        b"\xa0chunked",
        b"chunked\xa0", b"\x85chunked", b'"chunked"', b"'chunked'", b"chu nked", b"chun\xc3\xabked",
        b"c\r\n hunked",
        b"\r\n chunked", b"\r\n\tchunked", b"\n chunked", b"chunked\r\n ", b"chunked\rX: y", b"x\r\nX\r: y",
        b"chunked\r\nContent-Length: 5", b"chunked\r\nContent-Length: 0", b"chunked\r\nContent-Length:",
        b"chunked\r\nTransfer-Encoding: chunked", b"chunked\r\nTransfer-Encoding: identity",
        b"identity\r\nTransfer-Encoding: chunked", b"chunked\r\ntransfer-encoding:",
        b"chunked\r\ncontent-length: 5",
    ):  # fmt: skip
        yield refused(f"Transfer-Encoding is {shown(value)}", head(b"Transfer-Encoding: " + value) + end)
    for name in (
        b"Transfer-Encoding ", b"Transfer-Encoding\t", b" Transfer-Encoding", b"\tTransfer-Encoding",
        b"Transfer-Encoding\0", b"\0Transfer-Encoding", b"Transfer-Encoding\x0b", b"\x0bTransfer-Encoding",
        b"Transfer-Encoding;", b"Transfer-Encoding\r", b"Transfer-Encoding\r\n", b"Transfer\xadEncoding",
        b"Transfer Encoding", b"X: y\rTransfer-Encoding", b"X: y\nTransfer-Encoding",
        b"X: y\r\rTransfer-Encoding",
        b"Content-Length: 5\r\nTransfer-Encoding", b"Content-Length: 0\r\nTransfer-Encoding",
        b"Content-Length:\r\nTransfer-Encoding", b"X: y\r\n Transfer-Encoding", b"\xefTransfer-Encoding",
    ):  # fmt: skip
        yield refused(f"chunked is the value of {shown(name)}", head(name + b": chunked") + end)
    for line in (
        b"Transfer-Encoding:chunked", b"Transfer-Encoding: \t chunked", b"Transfer-Encoding: chunked \t",
        b"transfer-encoding: CHUNKED", b"TRANSFER-ENCODING: Chunked", b"TransFer-EncoDing: chunkeD",
    ):  # fmt: skip
        yield served(f"the line {shown(line)}", head(line) + b"2\r\nhi\r\n" + end, (b"POST /echo", b"hi"))
    for name in (
        b"Transfer_Encoding",
        b"X-Transfer-Encoding",
        b"Transfer-Encoding-X",
        b"TransferEncoding",
        b"TE",
    ):
        yield served(f"{shown(name)} is another header", head(name + b": chunked"), (b"POST /echo", b""))
    for first in (b"POST /echo HTTP/1.0", b"GET /echo HTTP/1.0"):
        yield refused(
            f"chunks after {shown(first)}", head(CHUNKED, b"Connection: keep-alive", first=first) + end
        )
    yield served("a GET with chunks", head(CHUNKED, first=b"GET /echo HTTP/1.1") + end, (b"GET /echo", b""))


def content_lengths() -> Iterator[RawCase]:
    for value in (
        b"", b"+5", b"-5", b"-0", b"5 5", b"5,5", b"5, 5", b"5 , 5", b"5,6", b"5,", b",5", b"0x5", b"0b1",
        b"5.0",
        b"5e0", b"5_0", b"five", b"\x0b5", b"5\x0b", b"5\x0c", b"5\0", b"\0005", b"\xb2", b"\xd9\xa5",
        b"5\xa0",
        b"\xa05", b"\xef\xbc\x95", b'"5"', b"'5'", b"5;", b"5;q=1", b"5\r\n 0", b"\r\n 5", b"5\r", b"5\n",
        b"5\rX: y",
        b"9" * 19, b"18446744073709551616", b"9223372036854775808", b"18446744073709551621", b"9" * 5000,
        b"0" * 300 + b"5", b"infinity", b"nan", b"5h", b"(5)", b"5\r\nContent-Length: 5",
        b"5\r\nContent-Length: 6",
        b"0\r\nContent-Length: 5", b"5\r\ncontent-length: 5", b"5\r\nContent-Length:",
    ):  # fmt: skip
        yield refused(f"Content-Length is {shown(value[:40])}", head(b"Content-Length: " + value) + b"hello")
    for name in (
        b"Content-Length ", b"Content-Length\t", b" Content-Length", b"Content-Length\0", b"\0Content-Length",
        b"Content-Length\x0b", b"Content-Length;", b"Content-Length\r", b"Content-Length\r\n",
        b"Content Length",
        b"X: y\rContent-Length", b"X: y\nContent-Length", b"X: y\r\n Content-Length",
    ):  # fmt: skip
        yield refused(f"5 is the value of {shown(name)}", head(name + b": 5") + b"hello")
    for value in (b"5", b" 5 ", b"\t5\t", b"05", b"0" * 17 + b"5"):
        yield served(
            f"Content-Length is {shown(value)}",
            head(b"Content-Length:" + value) + b"hello",
            (b"POST /echo", b"hello"),
        )
    for value in (b"0", b"00"):
        yield served(
            f"Content-Length is {shown(value)}", head(b"Content-Length: " + value), (b"POST /echo", b"")
        )
    for name in (b"Content_Length", b"X-Content-Length", b"ContentLength"):
        yield served(f"{shown(name)} is another header", head(name + b": 5"), (b"POST /echo", b""))
    for method in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
        data = head(b"Content-Length: 5", first=method + b" /echo HTTP/1.1") + b"hello"
        yield served(f"a body in {shown(method)}", data, (method + b" /echo", b"hello"))
    looks = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    yield served(
        "a body that looks like a request",
        head(b"Content-Length: %d" % len(looks)) + looks,
        (b"POST /echo", looks),
    )


def chunked_bodies() -> Iterator[RawCase]:
    start = head(CHUNKED)
    end = b"0\r\n\r\n"
    for line in (
        b"2", b"002", b"0" * 14 + b"2", b"2;a", b"2;a=b", b'2;a="b;c"', b"2 ;a", b"2\t; a = b", b"2;",
        b"2;;", b"2;\xff",
        b"2;" + b"x" * 3000,
    ):  # fmt: skip
        data = start + line + b"\r\nhi\r\n" + end
        yield served(f"the chunk line {shown(line[:30])}, {len(line)}", data, (b"POST /echo", b"hi"))
    for line in (
        b"", b"2 ", b" 2", b"\t2", b"2\t", b"0x2", b"+2", b"-2", b"2_0", b"2,", b"2.", b"2h", b"\xb2",
        b"2\0", b"2\x0b",
        b"two", b"2;a\0b", b"2;a\x7f", b"2;a\nb", b"2;a\rb", b"2\n", b"2\r", b"2 a", b"2:a", b"1" * 16,
        b"f" * 15 + b"0000000002", b"2;" + b"x" * 5000, b"-1", b"80000000000000000",
    ):  # fmt: skip
        yield refused(f"the chunk line {shown(line[:30])}", start + line + b"\r\nhi\r\n" + end)
    for ending in (
        b"\rX",
        b"\r",
        b"\n",
        b"",
        b"X",
        b"X\r\n",
        b"\r\r\n",
        b"\n\r",
        b"\0\r\n",
        b" \r\n",
        b"\r\n\r\n",
    ):
        yield refused(f"a chunk ends with {shown(ending)}", start + b"2\r\nhi" + ending + end)
    yield refused("a chunk line ends with an LF", start + b"2\nhi\r\n" + end)
    yield refused("the last chunk line ends with an LF", start + b"2\r\nhi\r\n0\n\r\n")
    yield refused("all lines of chunks end with an LF", start + b"2\nhi\n0\n\n")
    for trailer in (b"X: y", b"X:", b"X: y\r\nZ: y", b"Content-Length: 5", b"Host: b",
                    b"Transfer-Encoding: gzip", b"Connection: close", b"X: \xff"):  # fmt: skip
        data = start + b"2\r\nhi\r\n0\r\n" + trailer + b"\r\n\r\n"
        yield served(f"the trailer {shown(trailer)}", data, (b"POST /echo", b"hi"))
    for trailer in (b"no colon", b"X : y", b" X: y", b"X: y\r\n z", b": y", b"X: \0", b"X: a\rb", b"X\n: y",
                    b"X: y\n", b"X\xe9: y", b"X: " + b"y" * 5000, b"X: y\r\n" * 3000):  # fmt: skip
        data = start + b"2\r\nhi\r\n0\r\n" + trailer + b"\r\n\r\n"
        yield refused(f"the trailer {shown(trailer[:30])}", data)
    data = start + b"2\r\nhi\r\n4\r\n you\r\nA\r\n0123456789\r\na\r\n0123456789\r\n" + end
    yield served("several chunks", data, (b"POST /echo", b"hi you01234567890123456789"))
    smuggled = start + b"%x\r\n" % len(SMUGGLED) + SMUGGLED + b"\r\n" + end
    yield served("a chunk that looks like a request", smuggled, (b"POST /echo", SMUGGLED))
    yield served("very small chunks", start + b"1\r\nx\r\n" * 1000 + end, (b"POST /echo", b"x" * 1000))
    two = (start + b"2\r\nhi\r\n" + end) * 2
    yield served("two bodies in chunks", two, (b"POST /echo", b"hi"), (b"POST /echo", b"hi"))


def connections() -> Iterator[RawCase]:
    seen = (b"POST /echo", b"")
    for lines in (
        (b"Connection: close",),
        (b"Connection: keep-alive, Close",),
        (b"Connection: upgrade, Close",),
        (b"Connection: x",) * 2 + (b"Connection: close",),
    ):
        yield RawCase(f"after {shown(lines[-1])}, {len(lines)}", head(*lines) + SMUGGLED, (200,), (seen,))
    first = b"POST /echo HTTP/1.0"
    yield RawCase("after a request of HTTP/1.0", head(first=first) + SMUGGLED, (200,), (seen,))
    data = head(b"Connection: keep-alive, close", first=first) + SMUGGLED
    yield RawCase("after a request of HTTP/1.0 that would and would not be kept", data, (200,), (seen,))
    yield served("keep-alive in HTTP/1.0", head(b"Connection: Keep-Alive", first=first), seen)
    for value in (
        b"keep-alive",
        b"closed",
        b"x, y",
        b"",
        b"upgrade",
        b"Upgrade, HTTP2-Settings\r\nUpgrade: h2c",
    ):
        yield served(f"Connection is {shown(value)}", head(b"Connection: " + value), seen)
    upgrade = (b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 2")
    yield served("a body after an upgrade that is ignored", head(*upgrade) + b"hi", (b"POST /echo", b"hi"))
    upgrade = (b"Connection: Upgrade", b"Upgrade: h2c", CHUNKED)
    data = head(*upgrade) + b"2\r\nhi\r\n0\r\n\r\n"
    yield served("chunks after an upgrade that is ignored", data, (b"POST /echo", b"hi"))
    yield served("two requests at once", head() * 2, seen, seen)
    yield served("many requests at once", head() * 30, *[seen] * 30)
    bad = RawCase(
        "a malformed request after a good one", head() + head(b"no colon") + SMUGGLED, (200, 400), (seen,)
    )
    yield bad
    for other in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\x04\0\0\0\0\0\0\x03\0\0\0\x64",):
        yield refused("the preface of HTTP/2", other, 505)
    for name, other in (
        ("a TLS handshake", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(range(256))),
        ("a response", b"HTTP/1.1 200 OK\r\n\r\n"), ("SSH", b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
        ("Redis", b"*1\r\n$4\r\nPING\r\n\r\n"), ("the PROXY protocol", b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n"),
        ("SMTP", b"EHLO a\r\n\r\n"), ("HTTP/0.9", b"GET /echo\r\n\r\n"),
    ):  # fmt: skip
        yield refused(f"{name} in place of HTTP", other)


#: The cases by family.
FAMILIES = (
    transfer_encodings,
    content_lengths,
    chunked_bodies,
    connections,
)
