"""Frames that are posted in one iteration of the event loop are sent together."""

from __future__ import annotations

import asyncio
from typing import Any

from daskserve.cluster.channel.wire.transport import CALL_WORK, MAX_WORK, Outbox


class Sender(Outbox):
    """Keeps the messages that it sends; a frame ``None`` cannot be packed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = True
        self.sent: list[list[Any]] = []
        self.refused: list[Any] = []
        self._refuse = lambda frame, error: self.refused.append(frame)

    def _can_send(self) -> bool:
        return self.is_open

    def _send(self, frames: list[Any]) -> None:
        if None in frames:
            raise TypeError("None cannot be packed")
        self.sent.append(frames)


def test_frames_of_one_iteration_are_sent_together_and_a_full_group_at_once() -> None:
    async def scenario() -> None:
        sender = Sender()
        sender.post("a")
        sender.post("b")
        assert (sender.sent, sender.turn) == ([], 0)
        await asyncio.sleep(0)
        assert (sender.sent, sender.turn) == ([["a", "b"]], 1)
        for number in range(MAX_WORK // CALL_WORK):
            sender.post(number, CALL_WORK)
        assert sender.sent[1:] == [list(range(MAX_WORK // CALL_WORK))]
        await asyncio.sleep(0)
        assert sender.turn == 2

    asyncio.run(scenario())


def test_frames_that_cannot_be_sent_yet_are_kept() -> None:
    async def scenario() -> None:
        sender = Sender()
        sender.is_open = False
        sender.post("a")
        await asyncio.sleep(0)
        sender.post("b")
        await asyncio.sleep(0)
        assert (sender.sent, sender.unsent) == ([], ["a", "b"])
        sender.is_open = True
        sender.flush()
        assert (sender.sent, sender.unsent) == ([["a", "b"]], [])

    asyncio.run(scenario())


def test_only_the_frame_that_cannot_be_packed_is_refused() -> None:
    async def scenario() -> None:
        sender = Sender()
        for frame in ("a", None, "b"):
            sender.post(frame)
        sender.flush()
        assert (sender.sent, sender.refused) == ([["a"], ["b"]], [None])

    asyncio.run(scenario())
