"""Multi-part messages arrive unchanged, however the bytes are fragmented."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.cluster.channel.wire import transport
from daskserve.cluster.channel.wire.frames import (
    LARGE_BYTES,
    MAX_PARTS,
    PART_BYTES,
    Buffer,
    in_parts,
    is_last,
)
from daskserve.cluster.channel.wire.transport import (
    BUFFER_BYTES,
    HEAD,
    MAX_MESSAGE_BYTES,
    SIZE,
    PartReader,
)

MAGIC = b"test"
SIZES = (0, 1, 100, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, BUFFER_BYTES, BUFFER_BYTES + 1)


def message(parts: Sequence[bytes]) -> bytes:
    sizes = b"".join(SIZE.pack(len(part)) for part in parts)
    return HEAD.pack(MAGIC, len(parts)) + sizes + b"".join(parts)


class Reading:
    """Feeds bytes to a reader and keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []
        self.reader = PartReader(MAGIC, self.receive)

    def receive(self, parts: Sequence[Buffer]) -> None:
        self.messages.append([bytes(part) for part in parts])

    def feed(self, data: bytes, largest: int) -> None:
        at = 0
        while at < len(data):
            room = self.reader.room()
            assert len(room) > 0
            size = min(len(room), largest, len(data) - at)
            room[:size] = data[at : at + size]
            at += size
            self.reader.filled(size)


def part(size: int, seed: int) -> bytes:
    return bytes([seed % 256]) * (size // 2) + bytes([(seed + 1) % 256]) * (size - size // 2)


@given(
    messages=st.lists(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4), min_size=1, max_size=4),
    largest=st.sampled_from((1021, 8192, LARGE_BYTES, 10**9)),
)
def test_messages_survive_any_fragmentation(messages: list[list[int]], largest: int) -> None:
    expected = [[part(size, 7 * i + j) for j, size in enumerate(sizes)] for i, sizes in enumerate(messages)]
    reading = Reading()
    reading.feed(b"".join(map(message, expected)), largest)
    assert reading.messages == expected


def test_messages_arrive_byte_by_byte() -> None:
    expected = [[b"one"], [b"", b"two", b"x" * LARGE_BYTES], [b"three"]]
    reading = Reading()
    reading.feed(b"".join(map(message, expected)), 1)
    assert reading.messages == expected


def test_a_message_with_the_maximum_number_of_parts() -> None:
    expected = [[b"ab"] * MAX_PARTS, [b"c"]]
    reading = Reading()
    reading.feed(b"".join(map(message, expected)), 10**9)
    assert reading.messages == expected


def test_bytes_that_are_no_message_are_refused() -> None:
    for data in [b"GET / HTTP/1.1\r\n", HEAD.pack(MAGIC, 0), HEAD.pack(MAGIC, MAX_PARTS + 1)]:
        reading = Reading()
        with pytest.raises(ValueError, match="no message begins with"):
            reading.feed(data, 10**9)


@pytest.mark.parametrize("sizes", [[2 << 30], [5, 2 << 30]])
def test_a_size_that_is_only_claimed_takes_no_memory(sizes: list[int]) -> None:
    process = psutil.Process()
    reading = Reading()
    before = process.memory_info().rss
    reading.feed(HEAD.pack(MAGIC, len(sizes)) + b"".join(map(SIZE.pack, sizes)) + bytes(20), 10**9)
    reading.feed(bytes(8 << 20), 10**9)
    assert process.memory_info().rss - before < 64 << 20
    assert reading.messages == []


def test_a_part_that_takes_memory_as_it_arrives_is_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAPPED_BYTES", BUFFER_BYTES)
    expected = [[part(BUFFER_BYTES, 1), b"", part(3 * BUFFER_BYTES + 1, 2)], [part(BUFFER_BYTES + 1, 3)]]
    received: list[Buffer] = []
    reading = Reading()
    reading.reader = PartReader(MAGIC, received.extend)
    reading.feed(b"".join(map(message, expected)), 10_000)
    assert [bytes(each) for each in received] == [each for some in expected for each in some]
    for each in received:
        if len(each) > BUFFER_BYTES:
            each[0] = 77  # type: ignore[index]


def test_a_message_above_the_maximum_is_refused() -> None:
    for sizes in [[MAX_MESSAGE_BYTES + 1], [2**64 - 1], [5, MAX_MESSAGE_BYTES], [MAX_MESSAGE_BYTES // 8] * 9]:
        reading = Reading()
        with pytest.raises(ValueError, match=f"{sum(sizes)} bytes exceeds the maximum"):
            reading.feed(HEAD.pack(MAGIC, len(sizes)) + b"".join(map(SIZE.pack, sizes)), 10**9)


# ---- bodies in parts


def test_a_large_part_of_a_body_is_sent_as_several() -> None:
    for size in [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES]:
        for more_body in [False, True]:
            message = {"type": "http.request", "body": bytes(size), "more_body": more_body}
            sent = list(in_parts(message))
            assert b"".join(part["body"] for part in sent) == bytes(size), more_body
            assert max(len(part["body"]) for part in sent) <= PART_BYTES, more_body
            assert [is_last(part) for part in sent] == [False] * (len(sent) - 1) + [not more_body], more_body


def test_other_messages_stay_as_they_are() -> None:
    for message in ({"type": "websocket.receive", "text": "x" * 3 * PART_BYTES}, {"type": "http.disconnect"}):
        assert list(in_parts(message)) == [message]
