"""What the head of a request says, taken apart."""

from __future__ import annotations

import re
import time

import pytest

from daskserve.proxies.exchange.request_head import (
    HeadLimits,
    RefusedRequestError,
    asks_to_continue,
    body_length,
    check_host,
    keeps_alive,
    read_head,
    split_target,
)


@pytest.mark.parametrize(
    ("framing", "expected"),
    [
        ({}, 0),
        ({"Content-Length": "5"}, 5),
        ({"Content-Length": "005"}, 5),
        ({"Transfer-Encoding": "Chunked"}, None),
    ],
)
def test_the_announced_length(framing: dict[str, str], expected: int | None) -> None:
    assert body_length(framing, "HTTP/1.1") == expected


@pytest.mark.parametrize(
    "length", ["", "x", "+5", "5, 6", "5, 5", "5,5", "5,", "٥", "0x5", "5_0", "1" * 19, "9" * 5000]
)
def test_invalid_lengths_are_refused(length: str) -> None:
    with pytest.raises(RefusedRequestError):
        body_length({"Content-Length": length}, "HTTP/1.1")


@pytest.mark.parametrize(
    ("framing", "version"),
    [
        ({"Transfer-Encoding": "chunked", "Content-Length": "5"}, "HTTP/1.1"),
        ({"Transfer-Encoding": "gzip, chunked"}, "HTTP/1.1"),
        ({"Transfer-Encoding": "chunked,chunked"}, "HTTP/1.1"),
        ({"Transfer-Encoding": "identity"}, "HTTP/1.1"),
        ({"Transfer-Encoding": "chunked"}, "HTTP/1.0"),
    ],
)
def test_ambiguous_transfer_codings_are_refused(framing: dict[str, str], version: str) -> None:
    with pytest.raises(RefusedRequestError, match="Transfer-Encoding"):
        body_length(framing, version)


@pytest.mark.parametrize("host", ["", "a", "a.b:80", "a:", "[::1]", "[::1]:80", "%61", "_x"])
def test_hosts(host: str) -> None:
    check_host({"Host": host}, "HTTP/1.1")


@pytest.mark.parametrize("host", ["a,b", "a b", "u@a", "a/b", "a:b", "[::1", "\xff", "%zz", "http://a"])
def test_invalid_hosts_are_refused(host: str) -> None:
    with pytest.raises(RefusedRequestError, match="Host"):
        check_host({"Host": host}, "HTTP/1.1")


def test_only_before_http_1_1_a_request_needs_no_host() -> None:
    check_host({}, "HTTP/1.0")
    with pytest.raises(RefusedRequestError, match="Host"):
        check_host({}, "HTTP/1.1")


@pytest.mark.parametrize(
    ("connection", "version", "expected"),
    [
        ("", "HTTP/1.1", True),
        ("", "HTTP/1.0", False),
        ("Keep-Alive", "HTTP/1.0", True),
        ("close", "HTTP/1.1", False),
        ("upgrade, Close", "HTTP/1.1", False),
        ("keep-alive, close", "HTTP/1.0", False),
        ("upgrade", "HTTP/1.1", True),
        ("closed", "HTTP/1.1", True),
    ],
)
def test_the_connection_header_and_version_decide_keep_alive(
    connection: str, version: str, expected: bool
) -> None:
    assert keeps_alive(connection, version) == expected


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("GET", "/a?b?c", ("/a", "b?c")),
        ("GET", "//a", ("//a", "")),
        ("GET", "/a:b://c", ("/a:b://c", "")),
        ("GET", "http://a/b?c", ("/b", "c")),
        ("GET", "http://a", ("/", "")),
        ("GET", "http://a?b/c", ("/", "b/c")),
        ("OPTIONS", "*", ("*", "")),
        ("CONNECT", "a:443", ("a:443", "")),
    ],
)
def test_targets(method: str, target: str, expected: tuple[str, str]) -> None:
    assert split_target(method, target, "a") == expected


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "*"),
        ("GET", "a"),
        ("GET", "a:443"),
        ("GET", "?a"),
        ("GET", "http:///a"),
        ("GET", "1http://a"),
        ("GET", "ftp://a/"),
        ("GET", "http://a:b/"),
        ("GET", "http://u@a/"),
        ("GET", "http://u:p@a/"),
        ("GET", "http://a b/"),
        ("GET", "http://%zz/"),
        ("CONNECT", "/a"),
        ("CONNECT", "http://a:80"),
        ("CONNECT", "*"),
    ],
)
def test_invalid_targets_are_refused(method: str, target: str) -> None:
    with pytest.raises(RefusedRequestError, match="target"):
        split_target(method, target, "a")


@pytest.mark.parametrize(
    ("framing", "version", "expected"),
    [
        ({"Expect": "100-Continue"}, "HTTP/1.1", True),
        ({"Expect": "100-continue"}, "HTTP/1.0", False),
        ({"Expect": "something else"}, "HTTP/1.1", False),
        ({}, "HTTP/1.1", False),
    ],
)
def test_100_continue_is_understood_in_any_spelling_but_not_by_http_1_0(
    framing: dict[str, str], version: str, expected: bool
) -> None:
    assert asks_to_continue(framing, version) is expected


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("http://a/", "a"),
        ("HTTP://A/", "a"),
        ("http://a/", "a:80"),
        ("http://a:80/", "a"),
        ("http://a:/", "a"),
        ("https://a:443/", "a"),
        ("http://a:8000/", "a:8000"),
        ("http://[::1]:80/", "[::1]"),
        ("http://a/", None),
    ],
)
def test_a_url_in_the_target_names_the_same_host_as_the_header(target: str, host: str | None) -> None:
    assert split_target("GET", target, host) == ("/", "")


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("http://a/", "b"),
        ("http://a/", ""),
        ("http://a/", "a:8000"),
        ("http://a:8000/", "a"),
        ("https://a:80/", "a"),
        ("http://a.b/", "a"),
    ],
)
def test_a_url_of_another_host_than_the_header_is_refused(target: str, host: str) -> None:
    with pytest.raises(RefusedRequestError, match="different hosts"):
        split_target("GET", target, host)


# ---- the lines, as they were received

LIMITS = HeadLimits(1000, 8)
HEAD = b"POST /a?b HTTP/1.1\r\nhost: A\r\nX-A:  1 \r\nx-a:2\r\nexpect: x\r\n\r\n"


def refusal(data: bytes, limits: HeadLimits = LIMITS) -> RefusedRequestError:
    with pytest.raises(RefusedRequestError) as raised:
        read_head(data, 0, limits)
    return raised.value


@pytest.mark.parametrize("before", [b"", b"\r\n"])
@pytest.mark.parametrize("after", [b"", b"\r\n", b"GET / HTTP/1.1\n\n"])
def test_what_a_head_says(before: bytes, after: bytes) -> None:
    found = read_head(before + HEAD + after, 0, LIMITS)
    assert found is not None
    head, end = found
    assert end == len(before + HEAD)
    assert head[:3] == ("POST", "/a?b", "HTTP/1.1")
    headers, framing = head[3:]
    assert headers == [(b"host", b"A"), (b"x-a", b"1"), (b"x-a", b"2"), (b"expect", b"x")]
    assert framing == {"Host": "A", "Expect": "x"}


def test_a_head_is_read_however_it_is_cut() -> None:
    for step in (1, 2, 3, 7):
        searched = 0
        for end in range(step, len(HEAD), step):
            assert read_head(HEAD[:end], searched, LIMITS) is None
            searched = end
        assert read_head(HEAD, searched, LIMITS) == read_head(HEAD, 0, LIMITS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", "Header line 2"),
        (b"GET / HTTP/1.1\r\r\nHost: a\r\n\r\n", "request line"),
        (b"GET / HTTP/1.1\nHost: a\r\n\r\n", "CR LF"),
        (b"\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", "CR LF"),
        (b"\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", "request line"),
        (b"nonsense\r\n\r\n", "request line"),
        (b"get / HTTP/1.1\r\n\r\n", "upper case"),
        (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", "Header line 1"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", "Header line 2"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n b", "Header line 2"),
        (b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", "Header line 1.*CR LF"),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding : chunked\r\n\r\n", "Header line 1"),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: \x0bchunked\r\n\r\n", "Header line 1"),
    ],
)
def test_heads_that_are_none(data: bytes, reason: str) -> None:
    error = refusal(data)
    assert re.search(reason, str(error))
    assert (error.status, error.cause) == (400, "malformed")


@pytest.mark.parametrize("place", range(len(HEAD)))
def test_no_control_character_passes_anywhere_in_a_head(place: int) -> None:
    for byte in (*range(9), *range(11, 13), *range(14, 32), 127):
        for data in (HEAD[:place] + bytes([byte]) + part for part in (HEAD[place:], HEAD[place + 1 :])):
            try:
                found = read_head(data, 0, LIMITS)
            except RefusedRequestError:
                continue
            # The end of the head may be gone.
            assert found is None
            assert b"\r\n\r\n" not in data


def test_an_incomplete_head_that_cannot_become_one_is_refused_at_once() -> None:
    assert refusal(b"GET / HTTP/1.1\nHost").status == 400
    assert refusal(b"GET / HTTP/1.1\r\nA: b\r\n\rc").status == 400
    assert refusal(b"GET / HTTP/1.1\r\nA: b\r\n c").status == 400


def test_the_size_of_a_head_is_limited_exactly_complete_or_not() -> None:
    start = b"GET / HTTP/1.1\r\nA: "
    for size, status in ((1000, 0), (1001, 431)):
        data = start + b"b" * (size - len(start) - 4) + b"\r\n\r\n"
        assert len(data) == size
        if status:
            for part in (data, data + b"x", b"x" * size):
                assert (refusal(part).status, refusal(part).cause) == (431, "max_header_bytes")
        else:
            assert read_head(data, 0, LIMITS) is not None
            assert read_head(data[:-1], 0, LIMITS) is None


def test_the_number_of_headers_is_limited() -> None:
    for count, status in ((8, 0), (9, 431)):
        data = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * count + b"\r\n"
        if status:
            assert (refusal(data).status, refusal(data).cause) == (431, "max_headers")
            assert "9 headers; max_headers allows 8" in str(refusal(data))
        else:
            assert read_head(data, 0, LIMITS) is not None


def test_another_version_of_http_is_505() -> None:
    for version in (b"0.9", b"1.2", b"2.0", b"3.0"):
        assert refusal(b"HEAD / HTTP/%b\r\n\r\n" % version).status == 505
    assert refusal(b"HEAD / HTTP/2.0\r\n\r\n").method == "HEAD"


def test_each_byte_of_a_head_is_searched_once() -> None:
    data = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 16_000
    limits = HeadLimits(1 << 20, 1 << 20)
    started = time.process_time()
    assert read_head(data, 0, limits) is None
    whole_s = time.process_time() - started
    started = time.process_time()
    for _ in range(1000):
        assert read_head(data, len(data) - 1, limits) is None
    assert time.process_time() - started < 100 * whole_s
