"""Bad input from outside: every case ends with a 4xx or a closed connection, and affects no other client.

What the application saw, and what the client received, is compared with what a strict reader of the same
bytes makes of them (`reference_http`): no request may be seen that is not there.
"""

from __future__ import annotations

from contextlib import ExitStack
from urllib.parse import unquote_to_bytes

import pytest
import reference_http
from fuzz_requests import IDLE_S, MAX_BODY_BYTES, SMUGGLED, Delivery, deliveries
from fuzzed_server import FIXED, FuzzedServer, Outcome, Seen, fuzzed
from hypothesis import HealthCheck, given, settings
from reading_answers import ReplicaRequest, read_answers
from reference_http import Reading, State

from daskserve.common.types import ALL_HTTP_METHODS

pytestmark = pytest.mark.smoke

#: In every run of the suite; the profile ``nightly`` tries more, and others every time.
CASES = 500

KNOWN = {b"/echo", b"/early", b"/stream", b"/fixed"}
#: The statuses of heads that are refused.
REFUSALS = (400, 431, 501, 505)


@pytest.mark.parametrize(
    "kinds", [["memory"], pytest.param(["memory", "tornado", "asyncio"], marks=pytest.mark.nightly)]
)
def test_bad_input_affects_only_its_sender_and_has_one_response(kinds: list[str]) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(fuzzed(kind)) for kind in kinds]

        @settings(
            max_examples=max(CASES, settings().max_examples),
            suppress_health_check=list(HealthCheck),
        )
        @given(deliveries())
        def test(delivery: Delivery) -> None:
            methods = [reading.method.upper() for reading in reference_http.read(delivery.data)]
            told = [told_by(check(server, delivery), methods) for server in servers]
            if delivery.is_patient:
                assert told == told[:1] * len(told)

        test()


def told_by(outcome: Outcome, methods: list[bytes]) -> list[tuple[int, bool, bytes]]:
    """Return what the client was told: the statuses, and the bodies that are whole."""
    answers = read_answers(outcome.answer, methods)
    return [(answer.status, answer.is_cut, b"" if answer.is_cut else answer.body) for answer in answers]


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
    assert scope["headers"] == reading.headers
    assert reading.body.startswith(bytes(seen.body))
    if seen.is_complete:
        assert reading.state is State.WHOLE
        assert bytes(seen.body) == reading.body


def check_answers(readings: list[Reading], seen: list[Seen], answers: list[ReplicaRequest]) -> None:
    """Requests that are in order must be answered in full, up to the first that is not."""
    for number, reading in enumerate(readings):
        if reading.state is State.INVALID and not reading.has_head:
            assert [answer.status in REFUSALS for answer in answers[number:]] in ([], [True]), answers
        if reading.is_handshake or reading.state is not State.WHOLE:
            return
        has_timeout = bool(reading.values(b"x-request-timeout-seconds"))
        if has_timeout and len(answers) > number and answers[number].status == 400:
            continue  # the ingress wants a number there
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
        if reading.values(b"x-request-timeout-seconds"):
            assert answer.status in (200, 400, 405)  # none of what is tried is a time
        elif reading.method.decode() not in ALL_HTTP_METHODS:
            assert answer.status == 405, answer
        elif path in KNOWN:
            assert answer.status == 200, answer
            body = {b"/early": b"early", b"/fixed": FIXED}.get(path, reading.body)
            assert answer.body == (b"" if reading.method == b"HEAD" else body)
        assert len(seen) > number
        if reading.values(b"expect"):
            return  # the connection ends if the application did not ask for the body


# ---- cases by name: each was a fault once, or must never become one


def head(target: bytes, *lines: bytes, method: bytes = b"POST", version: bytes = b"HTTP/1.1") -> bytes:
    return b"\r\n".join([b" ".join((method, target, version)), b"Host: a", *lines, b"", b""])


CHUNKED = b"Transfer-Encoding: chunked"


def answers_to(server: FuzzedServer, data: bytes) -> list[ReplicaRequest]:
    """Return the answers; what else must hold is seen to."""
    methods = [reading.method for reading in reference_http.read(data)]
    return read_answers(check(server, Delivery(data)).answer, methods)


@pytest.mark.parametrize(
    "line",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 5, 6",
        b"Content-Length: +5",
        b"Content-Length : 5",
        b"Content-Length: 0x5",
        b"Content-Length: 5\x0b",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: \x0bchunked",
        b"Transfer-Encoding:\r\n chunked",
        b"Transfer-Encoding: xchunked",
        b"X: y\rTransfer-Encoding: chunked",
        b"Host: b",
    ],
)
def test_ambiguous_framing_is_refused(server: FuzzedServer, line: bytes) -> None:
    outcome = check(server, Delivery(head(b"/echo", line) + b"0\r\n\r\n" + SMUGGLED))
    assert outcome.seen == []
    assert outcome.answer.startswith(b"HTTP/1.1 400 ")


def test_chunked_requests_are_refused_in_http_1_0(server: FuzzedServer) -> None:
    data = head(b"/echo", CHUNKED, b"Connection: keep-alive", version=b"HTTP/1.0")
    outcome = check(server, Delivery(data + b"0\r\n\r\n" + SMUGGLED))
    assert outcome.seen == []
    assert outcome.answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("first", [head(b"/echo", b"Connection: close"), head(b"nowhere"), head(b"/", b"X")])
def test_nothing_is_served_after_the_last_request(server: FuzzedServer, first: bytes) -> None:
    outcome = check(server, Delivery(first + SMUGGLED))
    assert [seen.scope["path"] for seen in outcome.seen] in ([], ["/echo"])
    assert outcome.answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("target", "status", "is_cut", "body"),
    [
        (b"/echo", 400, False, None),
        (b"/early", 200, False, b"early"),
        (b"/stream", 200, True, b"hi"),
        (b"/fixed", 200, True, FIXED[:10]),
    ],
)
def test_a_malformed_body_causes_no_second_answer(
    server: FuzzedServer, target: bytes, status: int, is_cut: bool, body: bytes | None
) -> None:
    sent = head(target, CHUNKED) + b"2\r\nhi\r\n"
    outcome = check(server, Delivery(sent + b"zz\r\n", ((len(sent), 0.0),)))
    (answer,) = read_answers(outcome.answer, [b"POST"])
    assert (answer.status, answer.is_cut) == (status, is_cut)
    assert body is None or answer.body == body


def test_a_huge_content_length_is_answered_once(server: FuzzedServer) -> None:
    (answer,) = answers_to(server, head(b"/echo", b"Content-Length: 99999999999999999999"))
    assert answer.status == 400


def test_chunks_may_have_extensions_and_trailers(server: FuzzedServer) -> None:
    chunks = b'2;a;b="c;d"\r\nhi\r\n00004;x\r\n you\r\n0;end\r\nX-Trailer: 1\r\n\r\n'
    first, second = answers_to(server, head(b"/echo", CHUNKED) + chunks + head(b"/echo"))
    assert (first.status, first.body) == (200, b"hi you")
    assert second.status == 200


@pytest.mark.parametrize(
    "chunks",
    [
        b"2;" + b"x" * 400_000 + b"\r\nhi\r\n0\r\n\r\n",
        b"2;a\nb\r\nhi\r\n0\r\n\r\n",
        b"2\nhi\n0\n\n",
        b"2 \r\nhi\r\n0\r\n\r\n",
        b"2\r\nhiX0\r\n\r\n",
        b"-2\r\nhi\r\n0\r\n\r\n",
        b"2_0\r\nhi\r\n0\r\n\r\n",
        b"10000000000000002\r\nhi\r\n0\r\n\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\nX: \0\r\n\r\n",
        b"0\r\n" + b"X: y\r\n" * 60_000 + b"\r\n",
        b"0\r\nX: " + b"y" * 400_000 + b"\r\n\r\n",
    ],
)
def test_invalid_chunks_are_refused(server: FuzzedServer, chunks: bytes) -> None:
    outcome = check(server, Delivery(head(b"/echo", CHUNKED) + chunks + SMUGGLED))
    assert outcome.answer == b"" or outcome.answer.startswith(b"HTTP/1.1 400 ")
    assert not any(seen.is_complete or b"smuggled" in seen.scope["raw_path"] for seen in outcome.seen)


@pytest.mark.parametrize("value", [b"100-continue", b"100-Continue"])
def test_only_a_client_that_expects_100_gets_100_continue(server: FuzzedServer, value: bytes) -> None:
    lines = (b"Expect: " + value, b"Content-Length: 2")
    assert check(server, Delivery(head(b"/echo", *lines) + b"hi")).answer.startswith(b"HTTP/1.1 100 ")
    outcome = check(server, Delivery(head(b"/echo", *lines, version=b"HTTP/1.0") + b"hi"))
    assert outcome.answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data",
    [
        head(b"/echo", version=b"HTTP/1.1\r"),
        head(b"echo"),
        head(b"*"),
        head(b"/echo", method=b"CONNECT"),
        head(b"/echo").replace(b"Host: a", b"Host: a/b"),
    ],
)
def test_heads_that_are_none(server: FuzzedServer, data: bytes) -> None:
    outcome = check(server, Delivery(data))
    assert outcome.seen == []
    assert outcome.answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("target", [b"/echo", b"/stream", b"/fixed"])
def test_a_stalled_upload_is_ended_even_during_its_response(server: FuzzedServer, target: bytes) -> None:
    outcome = check(server, Delivery(head(target, b"Content-Length: 9") + b"hi"))
    (seen,) = outcome.seen
    assert not seen.is_complete


def test_a_slow_upload_may_take_longer_in_all_than_it_may_stall(server: FuzzedServer) -> None:
    for target in (b"/echo", b"/stream"):
        start = head(target, b"Content-Length: 6")
        stops = tuple((len(start) + number, 0.6 * IDLE_S) for number in range(6))
        outcome = check(server, Delivery(start + b"sixsix", stops))
        assert outcome.seen[0].is_complete


def test_a_head_may_not_take_longer_than_a_connection_may_be_idle(server: FuzzedServer) -> None:
    data = head(b"/echo", b"X: y")
    stops = tuple((number, 0.3 * IDLE_S) for number in range(10, 40, 5))
    outcome = check(server, Delivery(data, stops))
    assert (outcome.seen, outcome.answer) == ([], b"")


def test_the_handshake_of_a_websocket_has_no_body(server: FuzzedServer) -> None:
    lines = (
        b"Connection: Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    for body in ((b"Content-Length: 2", b"hi"), (CHUNKED, b"2\r\nhi\r\n0\r\n\r\n")):
        outcome = check(server, Delivery(head(b"/socket", *lines, body[0], method=b"GET") + body[1]))
        assert outcome.seen == []
        assert outcome.answer.startswith(b"HTTP/1.1 400 ")
