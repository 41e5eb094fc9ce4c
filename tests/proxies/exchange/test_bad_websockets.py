"""Bad input over WebSockets: invalid handshakes and frames, and clients that disconnect.

The messages of the application and of the server are compared with the result of a strict parser of the same
frames (`reference_websocket`).
"""

from __future__ import annotations

import reference_http
from fuzz_requests import Delivery
from fuzz_websockets import FIRST_LINES, LINES, conversations, frame
from fuzzed_server import MAX_MESSAGE_BYTES, FuzzedServer, Outcome
from hypothesis import HealthCheck, given, settings
from reading_answers import read_answers
from reference_websocket import End, Frames, read_frames
from test_bad_input import compare

#: The number of cases in every run of the suite. The profile ``nightly`` tries more, and new ones each time.
CASES = 100

LONGEST_HEAD_BYTES = 14
#: The size of the server's reads.
READ_BYTES = 16 * 1024

OPENING = b"\r\n".join([FIRST_LINES[0], *LINES, b"", b""])


def test_bad_websocket_input_affects_only_its_sender(server: FuzzedServer) -> None:
    @settings(
        max_examples=max(CASES, settings().max_examples),
        suppress_health_check=list(HealthCheck),
    )
    @given(conversations())
    def test(delivery: Delivery) -> None:
        check(server, delivery)

    test()


def check(server: FuzzedServer, delivery: Delivery) -> Outcome:
    """Deliver the input; compare the received and sent messages with the expected ones."""
    readings = reference_http.read(delivery.data)
    outcome = server.deliver(delivery)
    for seen, reading in zip(outcome.seen, readings, strict=False):
        compare(seen, reading)
    assert len(outcome.seen) <= len(readings)
    if outcome.answer.startswith(b"HTTP/1.1 101 "):
        check_frames(delivery, outcome)
    else:
        for answer in read_answers(outcome.answer, [reading.method for reading in readings]):
            assert 200 <= answer.status < 500, answer
    return outcome


def check_frames(delivery: Delivery, outcome: Outcome) -> None:
    sent = read_frames(after_head(delivery.data), is_masked=True, max_bytes=MAX_MESSAGE_BYTES)
    answered = read_frames(after_head(outcome.answer), is_masked=False, max_bytes=MAX_MESSAGE_BYTES)
    (seen,) = outcome.seen
    received = [
        message["bytes"] if message["text"] is None else message["text"]
        for message in seen.messages
        if message["type"] == "websocket.receive"
    ]
    assert received == sent.messages[: len(received)]
    assert answered.messages == sent.messages[: len(answered.messages)]
    assert answered.end in (End.OPEN, End.CLOSED), outcome.answer
    if answered.end is End.CLOSED:
        assert answered.rest == b"", f"something follows the closing: {answered.rest!r}"
    # Closing a connection with unread data resets it, which may destroy the closing code.
    is_over = sent.end is not End.OPEN
    is_reset = is_over and answered.end is End.OPEN and len(delivery.data) > READ_BYTES
    if delivery.is_patient and not is_reset:
        check_closing(sent, answered)


def check_closing(sent: Frames, answered: Frames) -> None:
    assert answered.end is End.CLOSED
    if sent.end is End.OPEN:
        # The message was never completed. In some cases its invalid end can be foreseen.
        assert answered.code in (1011, 1009, 1002, 1007)
        assert answered.code != 1011 or answered.messages == sent.messages
    elif sent.end is End.CLOSED:
        assert answered.code in (sent.code, 1009)
    elif sent.end is End.TOO_LARGE:
        assert answered.code in (1009, 1007)
    else:
        # A server may wait for the whole head of a frame before it parses the head.
        is_cut = len(sent.rest) < LONGEST_HEAD_BYTES
        assert answered.code in (1002, 1007, 1009) or (is_cut and answered.code == 1011)


def after_head(data: bytes) -> bytes:
    return data.partition(b"\r\n\r\n")[2]


# ---- cases by name


FRAMES = {
    "a reserved bit": (frame(1, b"hi", reserved=4), 1002),
    "a reserved opcode": (frame(3, b"hi"), 1002),
    "no mask": (frame(1, b"hi", mask=None), 1002),
    "a continuation of nothing": (frame(0, b"hi"), 1002),
    "a message within another": (frame(1, b"hi", is_final=False) + frame(1, b"hi"), 1002),
    "a ping that is too long": (frame(9, b"x" * 126), 1002),
    "a part of a ping": (frame(9, is_final=False), 1002),
    "half a closing code": (frame(8, b"\x03"), 1002),
    "a closing code that may not be sent": (frame(8, b"\x03\xee"), 1002),
    "a negative length": (frame(1, b"hi", length="negative"), 1002),
    "invalid text": (frame(1, b"\xff"), 1007),
    "invalid text in two parts": (frame(1, b"\xf0\x9f", is_final=False) + frame(0, b"\xff"), 1007),
    "an invalid closing reason": (frame(8, b"\x03\xe8\xff"), 1007),
    "a message that is too large": (frame(2, b"x" * (MAX_MESSAGE_BYTES + 1)), 1009),
    "a length that is too large": (frame(2, b"x" * 70_000, length="endless"), 1009),
    "too many parts": (frame(2, b"x", is_final=False) + frame(0, is_final=False) * 10_000, 1009),
}


def test_invalid_frames_close_the_websocket_with_their_code(server: FuzzedServer) -> None:
    for name, (frames, code) in FRAMES.items():
        outcome = check(server, Delivery(OPENING + frames + frame(1, b"late")))
        answered = read_frames(after_head(outcome.answer), is_masked=False, max_bytes=MAX_MESSAGE_BYTES)
        assert (answered.code, answered.messages) == (code, []), name


def test_invalid_handshakes_are_refused(server: FuzzedServer) -> None:
    for line, status in (
        (b"Sec-WebSocket-Protocol: a, \xff", 400),
        (b"Sec-WebSocket-Extensions: \xff", 400),
        (b"Connection: Upgrade, \xff", 400),
        (b"Sec-WebSocket-Key: short", 400),
        (b"Sec-WebSocket-Key: AQIDBAUGBwgJCgsMDQ4PEA==", 400),
        (b"Sec-WebSocket-Version: 12", 426),
        (b"Sec-WebSocket-Extensions: " + b"a," * 256, 400),
        (b"Sec-WebSocket-Protocol: a" + b";" * 256, 400),
    ):
        outcome = check(server, Delivery(b"\r\n".join([FIRST_LINES[0], *LINES, line, b"", b""])))
        assert outcome.seen == [], line
        assert outcome.answer.startswith(b"HTTP/1.1 %d " % status), line
        assert status != 426 or b"Sec-WebSocket-Version is '12'" in outcome.answer


def test_unusual_but_valid_handshakes_are_accepted(server: FuzzedServer) -> None:
    for old, new in (
        (b"/socket", b"/socket/%c3%a4?%ff"),
        (b"Host: test", b"Host: a..b"),
        (b"Host: test", b"Host: xn--a-\x7e"),
        (b"Host: test", b"Host: " + b"a" * 100),
        (b"Host: test", b"Host: test\r\nX-Latin: \xff"),
        (b"Host: test", b"Host: test\r\nSec-WebSocket-Protocol: a,, ,b"),
    ):
        outcome = check(server, Delivery(OPENING.replace(old, new) + frame(8)))
        assert outcome.answer.startswith(b"HTTP/1.1 101 "), new
        (seen,) = outcome.seen
        assert "" not in seen.scope["subprotocols"], new


def test_a_raw_path_is_accepted_or_refused(server: FuzzedServer) -> None:
    outcome = check(server, Delivery(OPENING.replace(b"/socket", b"/socket/\xc3\xa4?\xff") + frame(8)))
    if outcome.seen:
        assert outcome.seen[0].scope["path"] == "/socket/ä"
        assert outcome.answer.startswith(b"HTTP/1.1 101 ")
    else:
        assert outcome.answer.startswith(b"HTTP/1.1 400 ")


def test_valid_frames_are_echoed(server: FuzzedServer) -> None:
    frames = frame(1, b"a", is_final=False) + frame(9, b"?") + frame(0, b"b") + frame(2, b"\xff")
    outcome = check(server, Delivery(OPENING + frames + frame(8), ((len(OPENING + frames), 0.0),)))
    answered = read_frames(after_head(outcome.answer), is_masked=False, max_bytes=MAX_MESSAGE_BYTES)
    assert answered.messages == ["ab", b"\xff"]
    assert answered.pongs == [b"?"]
