"""Streams out of a batch: an async generator that yields a list at each step, and a reader for each place.

All of it is on one event loop. A reader that falls `AHEAD` results behind holds up its batch until it has
caught up, or has left: results would otherwise pile up without bound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from daskserve.clock import LoopClock
from daskserve.data.batching.queue import raisable
from daskserve.data.batching.results import as_results

#: How many results may wait for a reader. Plenty, so that a slow reader seldom holds up the others.
AHEAD = 1000


#: What a stream gives after its last result.
END: Final = object()


def is_end(result: Any) -> bool:
    """Whether a result says that there are no more for its reader."""
    if isinstance(result, type):
        return result is StopIteration or result is StopAsyncIteration
    return isinstance(result, (StopIteration, StopAsyncIteration))


class BatchStream:
    """The results of one call, on their way from its batch to its reader."""

    def __init__(self) -> None:
        self._results: deque[Any] = deque()
        self._changed = asyncio.Event()
        #: Settled with the batch, and earlier for a reader whose results have ended.
        self._outcome: asyncio.Future[Any] | None = None
        self.is_left = False

    # ---- the batch's side

    def follow(self, outcome: asyncio.Future[Any]) -> None:
        """End when the future does, with its error if it has one."""
        self._outcome = outcome
        outcome.add_done_callback(lambda _: self._changed.set())

    @property
    def is_wanted(self) -> bool:
        """Whether its reader waits for more."""
        return not self.is_left and self._outcome is not None and not self._outcome.done()

    async def put(self, result: Any) -> None:
        """Hand on a result, waiting while too many wait already."""
        self._results.append(result)
        self._changed.set()
        while len(self._results) >= AHEAD and self.is_wanted:
            self._changed.clear()
            await self._changed.wait()

    def end(self, error: Exception | None = None) -> None:
        """There are no more results."""
        if self._outcome is not None and not self._outcome.done():
            if error is None:
                self._outcome.set_result(END)
            else:
                self._outcome.set_exception(error)

    # ---- the reader's side

    async def get(self) -> Any:
        """Return the next result, `END` after the last one; raise what ended the stream before its time."""
        while not self._results:
            if self._outcome is not None and self._outcome.done():
                outcome, self._outcome = self._outcome, None
                try:
                    return outcome.result()
                finally:
                    del outcome  # else an error's traceback holds this frame, and this frame the error
            self._changed.clear()
            await self._changed.wait()
        result = self._results.popleft()
        self._changed.set()
        return result

    def leave(self) -> None:
        """Nobody reads any more."""
        self.is_left = True
        self._outcome = None
        self._results.clear()
        self._changed.set()


async def pass_on(name: str, generator: AsyncGenerator[Any, Any], streams: Sequence[BatchStream]) -> None:
    """Hand the lists of a batch's generator on to its readers, each in its place.

    Once nobody wants more the generator gets one step to end by itself, then it is closed.
    """
    is_over = False
    try:
        async for results in generator:
            for stream, result in zip(streams, as_results(name, results, len(streams)), strict=True):
                if not stream.is_wanted:
                    continue
                if is_end(result):
                    stream.end()
                elif isinstance(result, BaseException):
                    stream.end(raisable(result))
                else:
                    await stream.put(result)
            if not any(stream.is_wanted for stream in streams):
                if is_over:
                    break
                is_over = True
            # Readers come first, also where the generator itself never waits for anything.
            await LoopClock().sleep(0)
    finally:
        await generator.aclose()
