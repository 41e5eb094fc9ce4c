"""Heads of requests in one or several pieces; `raw_heads` has the valid and invalid contents."""

from __future__ import annotations

import itertools
import re
import time

import pytest

from daskserve.proxies.exchange.request.head import (
    HeadLimits,
    RefusedRequestError,
    read_head,
)

LIMITS = HeadLimits(1000, 8)
HEAD = b"POST /a?b HTTP/1.1\r\nhost: A\r\nX-A:  1 \r\nx-a:2\r\nexpect: x\r\n\r\n"


def refusal(data: bytes, limits: HeadLimits = LIMITS) -> RefusedRequestError:
    with pytest.raises(RefusedRequestError) as raised:
        read_head(data, 0, limits)
    return raised.value


def test_a_head_is_parsed_into_its_parts() -> None:
    for before, after in itertools.product((b"", b"\r\n"), (b"", b"\r\n", b"GET / HTTP/1.1\n\n")):
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


def test_heads_that_are_none() -> None:
    for data, reason in (
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
    ):
        error = refusal(data)
        assert re.search(reason, str(error)), data
        assert (error.status, error.cause) == (400, "malformed"), data


def test_no_control_character_passes_anywhere_in_a_head() -> None:
    controls = (*range(9), *range(11, 13), *range(14, 32), 127)
    for place, byte in itertools.product(range(len(HEAD)), controls):
        for data in (HEAD[:place] + bytes([byte]) + part for part in (HEAD[place:], HEAD[place + 1 :])):
            try:
                found = read_head(data, 0, LIMITS)
            except RefusedRequestError:
                continue
            # The change may have removed the end of the head.
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
