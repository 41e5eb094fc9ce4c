"""Frames, as far as other tests of channels do not cover them."""

from __future__ import annotations

from daskserve.cluster.channel.wire.frames import PART_BYTES, in_parts, is_last


def test_a_large_part_of_a_body_is_sent_as_several() -> None:
    for size in [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES]:
        for more_body in [False, True]:
            message = {"type": "http.request", "body": bytes(size), "more_body": more_body}
            parts = list(in_parts(message))
            assert b"".join(part["body"] for part in parts) == bytes(size), more_body
            assert max(len(part["body"]) for part in parts) <= PART_BYTES, more_body
            assert [is_last(part) for part in parts] == [False] * (len(parts) - 1) + [not more_body], (
                more_body
            )


def test_other_messages_stay_as_they_are() -> None:
    for message in ({"type": "websocket.receive", "text": "x" * 3 * PART_BYTES}, {"type": "http.disconnect"}):
        assert list(in_parts(message)) == [message]
