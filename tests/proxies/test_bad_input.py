"""Bad input from outside: every case ends with a 4xx or a closed connection, and hurts nobody else.

What the application saw, and what the client was told, is compared with what a strict reader of the same
bytes makes of them (`reference_http`): no request may be seen that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

import pytest
import reference_http
from fuzz_requests import MAX_BODY_BYTES, SMUGGLED, Delivery, deliveries
from fuzzed_server import FIXED, SERVER_KINDS, FuzzedServer, Outcome, Seen, fuzzed
from hypothesis import HealthCheck, given, settings
from reading_answers import Answer, read_answers
from reference_http import Reading, State

#: In every run of the suite; the profile ``nightly`` tries more, and others every time.
CASES = 500

KNOWN = {b"/echo", b"/early", b"/stream", b"/fixed"}


@pytest.fixture(params=sorted(SERVER_KINDS), scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[FuzzedServer]:
    with fuzzed(request.param) as server:
        yield server


def test_whatever_comes_in_nobody_but_its_sender_is_hurt(server: FuzzedServer) -> None:
    @settings(
        max_examples=max(CASES, settings().max_examples),
        suppress_health_check=list(HealthCheck),
    )
    @given(deliveries())
    def test(delivery: Delivery) -> None:
        check(server, delivery)

    test()


def check(server: FuzzedServer, delivery: Delivery) -> Outcome:
    """Deliver it; compare what was seen and answered with what is right."""
    readings = reference_http.read(delivery.data)
    outcome = server.deliver(delivery)
    for number, seen in enumerate(outcome.seen):
        assert number < len(readings), f"a request from nowhere: {seen.scope}"
        compare(seen, readings[number])
    answers = read_answers(outcome.answer, [reading.method.upper() for reading in readings])
    assert len(answers) <= len(readings), answers
    for answer in answers:
        assert answer.status < 500 or answer.status in (501, 505), answer
    if delivery.is_patient:
        check_answers(readings, outcome.seen, answers)
    return outcome


def compare(seen: Seen, reading: Reading) -> None:
    """What the application saw must be what was sent."""
    assert reading.has_head, f"seen, though it is invalid: {seen.scope}"
    scope = seen.scope
    path, query = reading.path_and_query()
    assert (scope["raw_path"], scope["query_string"]) == (path, query)
    assert scope["path"] == unquote_to_bytes(path).decode("utf-8", "replace")
    assert scope["http_version"].encode() == reading.version[5:]
    if scope["type"] == "http":
        assert scope["method"].encode() == reading.method.upper()
    # Several lengths that say the same may be passed on as one.
    assert sorted(set(scope["headers"])) == sorted(set(normalized(reading.headers)))
    assert reading.body.startswith(bytes(seen.body))
    if seen.is_complete:
        assert reading.state is State.WHOLE
        assert bytes(seen.body) == reading.body


def normalized(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [
        (name, value.split(b",")[0].strip() if name == b"content-length" else value)
        for name, value in headers
    ]


def check_answers(readings: list[Reading], seen: list[Seen], answers: list[Answer]) -> None:
    """Requests that are in order must be answered in full, up to the first that is not."""
    for number, reading in enumerate(readings):
        if reading.is_optional or reading.state is not State.WHOLE:
            if reading.state is not State.WHOLE and len(answers) > number and not reading.has_head:
                assert answers[number].status >= 400, answers
            return
        path = reading.path_and_query()[0]
        is_too_large = len(reading.body) > MAX_BODY_BYTES
        if number >= len(answers):
            # A response that had begun, or one whose reader sent on, may have been cut.
            assert is_too_large, f"no answer to {reading}"
            return
        answer = answers[number]
        if is_too_large:
            assert answer.is_cut or answer.status == 413 or path not in (b"/echo", b"/fixed"), answer
            return
        assert not answer.is_cut, answer
        if path in KNOWN:
            assert answer.status == 200, answer
            body = {b"/early": b"early", b"/fixed": FIXED}.get(path, reading.body)
            assert answer.body == (b"" if reading.method == b"HEAD" else body)
        assert len(seen) > number


# ---- cases by name


@pytest.mark.parametrize(
    ("lines", "is_seen"),
    [
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", False),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 5", False),
    ],
)
def test_smuggling_pairs(server: FuzzedServer, lines: bytes, is_seen: bool) -> None:
    data = b"POST /echo HTTP/1.1\r\nHost: a\r\n" + lines + b"\r\n\r\n0\r\n\r\n" + SMUGGLED
    outcome = check(server, Delivery(data))
    assert bool(outcome.seen) == is_seen
