"""Connections between simulated processes behave like sockets: ordered, by value, and closed at both ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from daskserve.cluster.channel.wire.frames import OUT_OF_BAND_BYTES, OutOfBand
from daskserve.cluster.local.run_state import RunState
from daskserve.cluster.local.transport import MemoryTransport, connect
from daskserve.common.clock import LoopClock

pytestmark = pytest.mark.virtual_time


class End:
    """One end, with the received and the refused frames."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.frames: list[Any] = []
        self.refused: list[Any] = []
        self.running = asyncio.create_task(
            transport.run(self.frames.extend, lambda f, e: self.refused.append(f))
        )


def pair(delay_s: Callable[[], float] = lambda: 0.0) -> tuple[End, End, RunState, RunState]:
    here, there = RunState(LoopClock()), RunState(LoopClock())
    ours, theirs = connect(("here", here.when_awake), ("there", there.when_awake), delay_s)
    return End(ours), End(theirs), here, there


async def test_frames_arrive_in_order_however_long_each_takes() -> None:
    delays = iter([3.0, 1.0, 0.0, 2.0])
    ours, theirs, *_ = pair(lambda: next(delays))
    for number in range(3):
        ours.transport.post([number])
        await asyncio.sleep(0.1)
    assert theirs.frames == []
    await asyncio.sleep(3)
    assert theirs.frames == [(0,), (1,), (2,)]


async def test_frames_are_copies_and_large_bytes_arrive_unchanged() -> None:
    ours, theirs, *_ = pair()
    large, buffer = b"x" * OUT_OF_BAND_BYTES, bytearray(OUT_OF_BAND_BYTES)
    ours.transport.post([[1, 2], OutOfBand(large), OutOfBand(buffer)])
    await asyncio.sleep(0.1)
    buffer[0] = 1
    ((numbers, same, copied),) = theirs.frames
    assert (numbers, same) == ((1, 2), large)
    assert copied[0] == 0
    copied[0] = 2  # writable, as an array needs it
    assert ours.transport.traffic.sent_bytes == theirs.transport.traffic.received_bytes > 2 * len(large)


async def test_closing_one_end_closes_the_other_after_all_sent_frames() -> None:
    ours, theirs, *_ = pair(lambda: 1.0)
    ours.transport.post(["last"])
    await asyncio.sleep(0.5)
    ours.transport.abort()
    await ours.running
    assert not theirs.running.done()
    await theirs.running
    assert theirs.frames == [("last",)]


async def test_frames_posted_to_a_closed_end_stay_unsent() -> None:
    ours, theirs, *_ = pair(lambda: 1.0)
    await asyncio.sleep(0.5)
    theirs.transport.abort()
    ours.transport.post(["late"])
    await ours.running
    assert list(ours.transport.unsent) == [["late"]]


async def test_an_invalid_frame_closes_the_connection() -> None:
    here, there = RunState(LoopClock()), RunState(LoopClock())
    ours, theirs = connect(("here", here.when_awake), ("there", there.when_awake), lambda: 0.0)

    def receive(frames: Any) -> None:
        raise LookupError(frames)

    running = [asyncio.create_task(each.run(receive, lambda *_: None)) for each in (ours, theirs)]
    ours.post([1])
    await asyncio.gather(*running)


async def test_a_suspended_process_neither_sends_nor_receives_until_it_resumes() -> None:
    ours, theirs, here, there = pair()
    await asyncio.sleep(0)
    here.suspend()
    ours.transport.post([1])
    theirs.transport.post([2])
    await asyncio.sleep(60)
    assert ours.frames == theirs.frames == []
    here.resume()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (ours.frames, theirs.frames) == ([(2,)], [(1,)])
    there.suspend()
    ours.transport.post([3])
    await asyncio.sleep(60)
    there.kill()
    await asyncio.sleep(60)
    assert theirs.frames == [(1,)]


async def test_frames_that_arrive_before_the_end_runs_are_kept() -> None:
    here, there = RunState(LoopClock()), RunState(LoopClock())
    ours, theirs = connect(("here", here.when_awake), ("there", there.when_awake), lambda: 0.0)
    End(ours)
    await asyncio.sleep(0)
    ours.post([1])
    await asyncio.sleep(1)
    late = End(theirs)
    await asyncio.sleep(0)
    assert late.frames == [(1,)]
