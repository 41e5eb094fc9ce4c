"""What the head of a request says, taken apart."""

from __future__ import annotations

import pytest

from daskserve.proxies.exchange.request_head import (
    asks_to_continue,
    body_length,
    check_host,
    keeps_alive,
    split_target,
)


@pytest.mark.parametrize(
    ("framing", "expected"),
    [
        ({}, 0),
        ({"Content-Length": "5"}, 5),
        ({"Content-Length": "005"}, 5),
        ({"Content-Length": "5, 5"}, 5),
        ({"Transfer-Encoding": "Chunked"}, None),
    ],
)
def test_the_announced_length(framing: dict[str, str], expected: int | None) -> None:
    assert body_length(framing, "HTTP/1.1") == expected


@pytest.mark.parametrize("length", ["", "x", "+5", "5, 6", "5,", "٥", "0x5", "5_0", "9" * 5000])
def test_invalid_lengths_are_refused(length: str) -> None:
    with pytest.raises(ValueError):
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
    with pytest.raises(ValueError, match="Transfer-Encoding"):
        body_length(framing, version)


@pytest.mark.parametrize("host", ["", "a", "a.b:80", "a:", "[::1]", "[::1]:80", "%61", "_x"])
def test_hosts(host: str) -> None:
    check_host({"Host": host}, "HTTP/1.1")


@pytest.mark.parametrize("host", ["a,b", "a b", "u@a", "a/b", "a:b", "[::1", "\xff", "%zz", "http://a"])
def test_invalid_hosts_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="Host"):
        check_host({"Host": host}, "HTTP/1.1")


def test_only_before_http_1_1_a_request_needs_no_host() -> None:
    check_host({}, "HTTP/1.0")
    for version in ("HTTP/1.1", "HTTP/1.2"):
        with pytest.raises(ValueError, match="Host"):
            check_host({}, version)


@pytest.mark.parametrize(
    ("connection", "version", "expected"),
    [
        ("", "HTTP/1.1", True),
        ("", "HTTP/1.0", False),
        ("", "HTTP/1.2", False),
        ("Keep-Alive", "HTTP/1.0", True),
        ("Keep-Alive", "HTTP/1.2", False),
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
    assert split_target(method, target) == expected


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "*"),
        ("GET", "a"),
        ("GET", "a:443"),
        ("GET", "?a"),
        ("GET", "http:///a"),
        ("GET", "1http://a"),
        ("CONNECT", "/a"),
        ("CONNECT", "http://a:80"),
        ("CONNECT", "*"),
    ],
)
def test_invalid_targets_are_refused(method: str, target: str) -> None:
    with pytest.raises(ValueError, match="target"):
        split_target(method, target)


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
