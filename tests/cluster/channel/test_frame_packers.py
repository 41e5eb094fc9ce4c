"""The packer of a connection is used again, whatever its last message was."""

from __future__ import annotations

import os
import tracemalloc
from typing import Any

import pytest
from tables import each_case

from daskserve.cluster.channel.wire.frames import DATA, LARGE_BYTES, FramePacker, OutOfBand, unpack
from daskserve.common.types import SHARED_BYTES


def across(packer: FramePacker, *frames: Any) -> list[Any]:
    body, large = packer.pack(frames)
    return list(unpack([body, *map(bytearray, large)]))


@each_case(
    "message",
    [
        [object()],
        [OutOfBand(b"x" * LARGE_BYTES), object()],  # the first value can be sent
        [1 << 64],
    ],
)
def test_a_refused_message_leaves_nothing_to_the_next(message: list[Any]) -> None:
    packer = FramePacker()
    with pytest.raises((TypeError, ValueError, OverflowError)):
        packer.pack(["x" * 1000, *message])
    large = b"y" * LARGE_BYTES
    assert across(packer, (DATA, 1, OutOfBand(large)), (DATA, 2, OutOfBand(b"small"))) == [
        (DATA, 1, large),
        (DATA, 2, b"small"),
    ]


def test_names_of_files_with_surrogates_arrive_beside_buffers() -> None:
    packer = FramePacker()
    name, large = os.fsdecode(b"\xff"), b"y" * LARGE_BYTES
    for _ in range(2):
        assert across(packer, OutOfBand(large), OutOfBand(b"small"), name) == [large, b"small", name]


def test_a_finalizer_may_send_while_a_message_is_packed() -> None:
    packer, found = FramePacker(), list[Any]()

    def share(view: memoryview) -> None:  # called while the message is packed, as a finalizer may be
        found.extend(across(packer, "inner", OutOfBand(b"z" * LARGE_BYTES)))

    body, large = packer.pack(["before", OutOfBand(b"y" * SHARED_BYTES), "after"], share)
    assert list(unpack([body, *map(bytearray, large)])) == ["before", b"y" * SHARED_BYTES, "after"]
    assert found == ["inner", b"z" * LARGE_BYTES]


def test_the_memory_of_a_large_message_is_given_back() -> None:
    packer = FramePacker()
    tracemalloc.start()
    try:
        assert across(packer, "x" * 4_000_000) == ["x" * 4_000_000]
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_error_says_what_cannot_be_sent() -> None:
    for value, text in ((1 << 64, "a whole number of more than 64 bits"), ({1}, "a set")):
        with pytest.raises(TypeError, match=f"{text} cannot be sent over a channel"):
            FramePacker().pack([value])
