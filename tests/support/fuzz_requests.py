"""Bad input for an HTTP server: valid requests, and damaged forms of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

#: Maximum size of a request body in these tests; a larger one must be refused.
MAX_BODY_BYTES = 4096
#: The idle timeout of the server under test, in seconds.
IDLE_S = 5.0

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: evil\r\n\r\n"

METHODS = [
    b"GET",
    b"POST",
    b"PUT",
    b"HEAD",
    b"OPTIONS",
    b"DELETE",
    b"BREW",
    b"get",
    b"CONNECT",
    b"G\xc3T",
    b"",
]
TARGETS = [
    b"/echo",
    b"/early",
    b"/stream",
    b"/fixed",
    b"/",
    b"/nowhere",
    b"/echo?a=1&b=%20",
    b"/echo/../x//y/.",
    b"/%2e%2e/%2F%zz%",
    b"/%00%0d%0aX:%201",
    b"/%ff\xff\xc3(",
    b"/\xc3\xa4?\xff",
    b"http://test/echo",
    b"http://test?q",
    b"ftp://u:p@x/echo",
    b"*",
    b"test:443",
    b"nothing",
    b"/a b",
    b"/a\tb",
    b"/a\x00b",
    b'/a#b<>"{}|\\^`',
    b"//x/-/healthz",
    b"/" + b"a" * 9000,
    b"/" + b"a" * 70_000,
    b"/echo?" + b"%41" * 30_000,
]
VERSIONS = [
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/1.2",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"HTTP/1.",
    b"HTTP/11",
    b"http/1.1",
    b"HTTP/1.1 ",
    b"HTTP/\xb9.\xb9",
    b"",
]
HOSTS = [
    b"Host: test",
    b"Host:",
    b"Host: [::1]:80",
    b"Host: a, b",
    b"Host: a b",
    b"Host: u@a/",
    b"host:\xfftest",
    b"",
]
#: Header lines; a server refuses a request with some of them.
HEADERS = [
    b"X-A: 1",
    b"x-a:  spaced \t ",
    b"X-A:",
    b"X-Latin: \xe4\xff",
    b"X-Request-ID: \xff\xfe",
    b"X-Request-ID: " + b"7" * 3000,
    b"X-Request-Timeout-Seconds: 1e309",
    b"X-Request-Timeout-Seconds: nan",
    b"X-Request-Timeout-Seconds: 9" + b"9" * 400,
    b"X-Serve-Shard-Key: \xff",
    b"X-SERVE-CALL-METHOD: \xff",
    b"X-Forwarded-For: \xff, 1.2.3.4:x, [::1",
    b"X-Forwarded-Proto: javascript",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Connection: keep-alive, Close",
    b"Connection: upgrade",
    b"Connection: upgrade\r\nUpgrade: websocket",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk",
    b"Expect: 100-continue",
    b"Expect: 100-Continue",
    b"Expect: miracles",
    b"Content-Length: 0",
    b"Content-Length: 3",
    b"Content-Length: 3, 3",
    b"Content-Length: 3 , 3",
    b"Content-Length: 3, 4",
    b"Content-Length: +3",
    b"Content-Length: -3",
    b"Content-Length: 3\x0b",
    b"Content-Length: 0x3",
    b"Content-Length: 3_0",
    b"Content-Length: \xb2",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: " + b"9" * 5000,
    b"Content-Length: " + b"0" * 300 + b"3",
    b"Content-Length:",
    b"Content-Length : 3",
    b"Content-Length\t: 3",
    b"Content_Length: 3",
    b"content-length: 3",
    b"Transfer-Encoding: chunked",
    b"transfer-encoding: CHUNKED",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked, gzip",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: ,chunked",
    b"Transfer-Encoding: chunked;q=1",
    b"Transfer-Encoding: \x0bchunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding:\r\n chunked",
    b"Transfer-Encoding: chu\r\n nked",
    b"Transfer-Encoding:",
    b"X: y\rTransfer-Encoding: chunked",
    b"X: y\nTransfer-Encoding: chunked",
    b"X: y\0",
    b"X: folded\r\n\tvalue",
    b" X: y",
    b"X y",
    b": y",
    b"X\xc3: y",
    b"X(y): z",
    b"X" * 70_000 + b": y",
    b"X: " + b"y" * 30_000,
    b"X: " + b"y" * 70_000,
    b"\r\n".join(b"X-%d: y" % number for number in range(900)),
    b"\r\n".join(b"X: y" for _ in range(9000)),
]
#: Bytes that are inserted at random places, and that make a request invalid at some of them.
TOKENS = [
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\0",
    b" ",
    b"\t",
    b":",
    b";",
    b",",
    b"0",
    b"1",
    b"f",
    b"-",
    b"%",
    b"/",
    b"?",
    b"\x0b",
    b"\x0c",
    b"\x1b[2J",
    b"\x7f",
    b"\x80",
    b"\x85",
    b"\xa0",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\xff",
    b" HTTP/1.1\r\n",
    b"0\r\n\r\n",
    b"\r\nContent-Length: 5\r\n",
    b"\r\nTransfer-Encoding: chunked\r\n",
    b"a" * 300,
    SMUGGLED,
]
#: The size lines of chunks; ``%b`` is the true size.
CHUNK_LINES = [
    b"%b\r\n",
    b"%b;name=value\r\n",
    b'%b;a="b;\xff";c\r\n',
    b"%b ; x\r\n",
    b"000%b\r\n",
    b"%b;" + b"x" * 3000 + b"\r\n",
    b"%b;" + b"x" * 70_000 + b"\r\n",
    b"%b;a\nb\r\n",
    b"%b \r\n",
    b" %b\r\n",
    b"%b\n",
    b"%b\r",
    b"0x%b\r\n",
    b"+%b\r\n",
    b"-%b\r\n",
    b"%b0\r\n",
    b"%bffffffffffffffff\r\n",
    b"%b_0\r\n",
    b"\xb2%b\r\n",
    b"zz%b\r\n",
    b"\r\n",
]
CHUNK_ENDS = [b"\r\n", b"\n", b"", b"\r", b"x\r\n", b"\r\r\n"]
TRAILERS = [
    b"",
    b"X-Trailer: 1\r\n",
    b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    b"X: " + b"y" * 3000 + b"\r\n",
    b"X: y\r\n" * 15_000,
    b"no colon\r\n",
    b"X: \0\r\n",
    b" folded: y\r\n",
    b"X: y\n",
]
#: Data of other protocols, and incomplete requests.
OTHERS = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\x04\0\0\0\0\0\0\x03\0\0\0\x64",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
    b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10",
    b"GET /\r\n",
    b"GET /\r\n\r\n",
    b"GET\r\n\r\n",
    b"\r\n",
    b"\r\n\r\n\r\n",
    b"\n\n\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"*1\r\n$4\r\nPING\r\n",
    b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n",
    b"\0" * 5000,
    b"\xff" * 70_000,
    b"A" * 200_000,
    b"\r\n" * 40_000,
]


@dataclass(frozen=True)
class Delivery:
    """The bytes of a connection, and how they arrive.

    Attributes
    ----------
    data : bytes
        All bytes that are sent.
    stops : tuple
        The positions at which the client pauses, each with its pause in seconds.
    ending : str
        ``"wait"`` for the server to close the connection, ``"close"`` it at once, or ``"reset"`` it.
    """

    data: bytes
    stops: tuple[tuple[int, float], ...] = ()
    ending: str = "wait"

    @property
    def is_patient(self) -> bool:
        """Whether the client neither pauses nor closes the connection itself."""
        return self.ending == "wait" and not any(pause_s for _, pause_s in self.stops)

    def __repr__(self) -> str:
        shown = repr(self.data) if len(self.data) < 3000 else f"{self.data[:1500]!r} ... {self.data[-500:]!r}"
        return f"Delivery({shown}, {self.stops}, {self.ending!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # otherwise hypothesis would print all of the data


# Most drawn parts are valid; otherwise no request would ever get beyond its first line. Strategies are
# created once, because creating one takes longer than drawing from it.
def _mostly(values: list[bytes], likely: int = 1, odds: int = 6) -> st.SearchStrategy[bytes]:
    """One of the first ``likely`` values, or, one time in ``odds``, any value."""
    return st.sampled_from(values[:likely] * (max(1, (odds - 1) * len(values) // likely)) + values)


_METHODS, _TARGETS, _VERSIONS = _mostly(METHODS, 4, 8), _mostly(TARGETS, 7, 4), _mostly(VERSIONS, 1, 8)
_HOSTS, _HEADERS = _mostly(HOSTS, 1, 12), st.lists(st.sampled_from(HEADERS), max_size=3)
_CHUNK_LINES, _CHUNK_ENDS = _mostly(CHUNK_LINES, 2, 5), _mostly(CHUNK_ENDS, 1, 8)
_BODIES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [SMUGGLED, b"0\r\n\r\n" + SMUGGLED, b"z" * 3000, b"z" * MAX_BODY_BYTES, b"z" * 5000, b"z" * 300_000]
    ),
)


_LINE_ENDS = _mostly([b"\r\n", b"\n", b"\r", b"\r\r\n"], 1, 12)
_FRAMINGS = st.sampled_from(["none", "length", "chunks"])
_SLIPS = st.sampled_from([0, 0, 0, 0, 0, 1, -1])
_SEVERAL_BODIES = st.lists(_BODIES, max_size=3)
_TRAILERS = _mostly(TRAILERS, 1, 3)
_YES_OR_NO = st.booleans()
_DAMAGES = st.sampled_from([0, 0, 1, 1, 2, 3])
_DAMAGE = st.tuples(
    st.integers(0, 400),
    st.integers(0, 12),
    st.sampled_from(["insert", "drop", "double", "overwrite"]),
    st.one_of(st.sampled_from(TOKENS), st.binary(min_size=1, max_size=3)),
)
_STRANGERS = st.one_of(st.sampled_from(OTHERS), st.binary())
_ENDINGS = st.sampled_from(["wait", "wait", "wait", "wait", "close", "reset"])
_PLACES = st.floats(0, 1)
_STOPS = st.lists(st.tuples(_PLACES, st.sampled_from([0.0] * 9 + [0.5 * IDLE_S, 0.7 * IDLE_S])), max_size=4)


@st.composite
def requests(draw: Callable[..., object]) -> bytes:
    """One request, valid or not."""
    lines = [b" ".join((draw(_METHODS), draw(_TARGETS), draw(_VERSIONS))), draw(_HOSTS)]
    framing = draw(_FRAMINGS)
    headers = draw(_HEADERS) if draw(_YES_OR_NO) else []
    body = b""
    if framing == "length":
        body = draw(_BODIES)
        headers.append(b"Content-Length: %d" % (len(body) + draw(_SLIPS)))
    elif framing == "chunks":
        headers.append(b"Transfer-Encoding: chunked")
        body = draw(chunks())
    lines += headers if draw(_YES_OR_NO) else headers[::-1]
    end = draw(_LINE_ENDS)
    return end.join([line for line in lines if line] + [b"", b""]) + body


@st.composite
def chunks(draw: Callable[..., object]) -> bytes:
    """A chunked body, valid or not."""
    parts = []
    for data in draw(_SEVERAL_BODIES):
        if data:
            parts += [draw(_CHUNK_LINES).replace(b"%b", b"%x" % len(data)), data, draw(_CHUNK_ENDS)]
    last = draw(_CHUNK_LINES).replace(b"%b", b"0")
    return b"".join([*parts, last, draw(_TRAILERS), draw(_CHUNK_ENDS)])


# Not a strategy, because its description would contain all of its arguments.
def damaged(draw: Callable[..., object], data: bytes) -> bytes:
    """The same bytes, with a few of them dropped, doubled, changed or inserted."""
    for _ in range(draw(_DAMAGES)):
        at, length, how, token = draw(_DAMAGE)  # near the start only
        middle = data[at : at + length]
        changed = {"insert": token + middle, "drop": b"", "double": middle * 2, "overwrite": token}[how]
        data = data[:at] + changed + data[at + length :]
    return data


@st.composite
def deliveries(draw: Callable[..., object]) -> Delivery:
    """The requests of one connection."""
    parts = draw(_SEVERAL_REQUESTS)
    if draw(_RARELY):
        parts.insert(draw(_INDICES) % (len(parts) + 1), draw(_STRANGERS))
    return delivered(draw, damaged(draw, b"".join(parts)))


_SEVERAL_REQUESTS = st.lists(requests(), min_size=1, max_size=3)
_RARELY = st.sampled_from([False] * 9 + [True])
_INDICES = st.integers(0, 3)


def delivered(draw: Callable[..., object], data: bytes) -> Delivery:
    """Bytes that arrive in pieces, with or without pauses, and perhaps incomplete."""
    ending = draw(_ENDINGS)
    if ending != "wait" or draw(_RARELY):
        data = data[: int(draw(_PLACES) * len(data))]
    stops = [(int(place * len(data)), pause_s) for place, pause_s in draw(_STOPS)]
    return Delivery(data, tuple(sorted(stops)), ending)
