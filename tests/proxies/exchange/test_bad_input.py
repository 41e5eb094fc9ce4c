"""Bad input from outside: every case ends with a 4xx or a closed connection, and affects no other client.

The requests that the application got, and the responses that the client got, are compared with the result of
a strict parser of the same bytes (`reference_http`): the application must not get a request that is not
there.
"""

from __future__ import annotations

from contextlib import ExitStack
from urllib.parse import unquote_to_bytes

import pytest
import reference_http
from fuzz_requests import MAX_BODY_BYTES, Delivery, deliveries
from fuzzed_server import FIXED, FuzzedServer, Outcome, Seen, fuzzed
from hypothesis import HealthCheck, given, settings
from raw_cases import head
from reading_answers import Answer, read_answers
from reference_http import Reading, State

pytestmark = pytest.mark.smoke

#: The number of cases in every run of the suite. The profile ``nightly`` tries more, and new ones each time.
CASES = 500

KNOWN = {b"/echo", b"/early", b"/stream", b"/fixed"}
#: The statuses of refused heads.
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
            received = [seen_by(check(server, delivery), methods) for server in servers]
            if delivery.is_patient:
                assert received == received[:1] * len(received)

        test()


def seen_by(outcome: Outcome, methods: list[bytes]) -> list[tuple[int, bool, bytes]]:
    """Return the client's responses: the statuses, and the complete bodies."""
    answers = read_answers(outcome.answer, methods)
    return [(answer.status, answer.is_cut, b"" if answer.is_cut else answer.body) for answer in answers]


def check(server: FuzzedServer, delivery: Delivery) -> Outcome:
    """Deliver the input; compare the requests and responses with the expected ones."""
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
    """Check that the application got the requests that were sent."""
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


def check_answers(readings: list[Reading], seen: list[Seen], answers: list[Answer]) -> None:
    """Check that valid requests get complete responses, up to the first invalid request."""
    for number, reading in enumerate(readings):
        if reading.state is State.INVALID and not reading.has_head:
            assert [answer.status in REFUSALS for answer in answers[number:]] in ([], [True]), answers
        if reading.is_handshake or reading.state is not State.WHOLE:
            return
        has_timeout = bool(reading.values(b"x-request-timeout-seconds"))
        if has_timeout and len(answers) > number and answers[number].status == 400:
            continue  # the ingress requires a number here
        path = reading.path_and_query()[0]
        is_too_large = len(reading.body) > MAX_BODY_BYTES
        if number >= len(answers):
            # A response may be cut if it had begun, or if its reader kept sending.
            assert is_too_large, f"no answer to {reading}"
            return
        answer = answers[number]
        if is_too_large:
            assert answer.is_cut or answer.status == 413 or path not in (b"/echo", b"/fixed"), answer
            return
        assert not answer.is_cut, answer
        if reading.values(b"x-request-timeout-seconds"):
            assert answer.status in (200, 400, 405)  # no case has a valid timeout
        elif path in KNOWN:
            assert answer.status == 200, answer
            body = {b"/early": b"early", b"/fixed": FIXED}.get(path, reading.body)
            assert answer.body == (b"" if reading.method == b"HEAD" else body)
        assert len(seen) > number
        if reading.values(b"expect"):
            return  # the connection ends if the application did not read the body


@pytest.mark.parametrize("value", [b"100-continue", b"100-Continue"])
def test_only_a_client_that_expects_100_gets_100_continue(server: FuzzedServer, value: bytes) -> None:
    for version, status in ((b"1.1", b"100"), (b"1.0", b"200")):
        data = head(b"Expect: " + value, b"Content-Length: 2", first=b"POST /echo HTTP/" + version) + b"hi"
        assert check(server, Delivery(data)).answer.startswith(b"HTTP/1.1 %b " % status)
