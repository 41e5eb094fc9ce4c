"""Streams of a batch: an async generator yields a list at each step, and each position has a reader.

The generator and the readers run on one event loop. A reader that is `MAX_BUFFERED_RESULTS` behind blocks its
batch until it reads or leaves. This bounds the number of buffered results.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from daskserve.common.clock import LoopClock
from daskserve.data.batching.results import as_results
from daskserve.payload.packed_errors import raisable

#: Maximum number of results that wait for a reader. The limit is large, so that a slow reader rarely blocks
#: others.
MAX_BUFFERED_RESULTS = 1000


#: Returned by `BatchStream.get` after the last result.
END: Final = object()


def is_end(result: Any) -> bool:
    """Return whether a result ends the stream of its reader."""
    if isinstance(result, type):
        return result is StopIteration or result is StopAsyncIteration
    return isinstance(result, (StopIteration, StopAsyncIteration))


class BatchStream:
    """The results of one call, from its batch to its reader."""

    def __init__(self) -> None:
        self._results: deque[Any] = deque()
        self._changed = asyncio.Event()
        #: Done when the batch ends, or earlier if the results of this reader end.
        self._outcome: asyncio.Future[Any] | None = None
        self.has_left = False

    # ---- called by the batch

    def follow(self, outcome: asyncio.Future[Any]) -> None:
        """End the stream with the future's outcome once the future is done."""
        self._outcome = outcome
        outcome.add_done_callback(lambda _: self._changed.set())

    @property
    def is_read(self) -> bool:
        """Whether the reader wants more results."""
        return not self.has_left and self._outcome is not None and not self._outcome.done()

    async def put(self, result: Any) -> None:
        """Add a result; wait until the buffer has room."""
        self._results.append(result)
        self._changed.set()
        while len(self._results) >= MAX_BUFFERED_RESULTS and self.is_read:
            self._changed.clear()
            await self._changed.wait()

    def end(self, error: Exception | None = None) -> None:
        """End the stream, with an error if one is given."""
        if self._outcome is not None and not self._outcome.done():
            if error is None:
                self._outcome.set_result(END)
            else:
                self._outcome.set_exception(error)

    # ---- called by the reader

    async def get(self) -> Any:
        """Return the next result, or `END` after the last one; raise the error that ended the stream."""
        while not self._results:
            if self._outcome is not None and self._outcome.done():
                outcome, self._outcome = self._outcome, None
                try:
                    return outcome.result()
                finally:
                    # otherwise an error and this frame reference each other
                    del outcome
            self._changed.clear()
            await self._changed.wait()
        result = self._results.popleft()
        self._changed.set()
        return result

    def leave(self) -> None:
        """Stop reading; drop the waiting results."""
        self.has_left = True
        self._outcome = None
        self._results.clear()
        self._changed.set()


async def distribute(name: str, generator: AsyncGenerator[Any, Any], streams: Sequence[BatchStream]) -> None:
    """Distribute the lists that a batch's generator yields to the readers, by position.

    Without readers, the generator may make one more step to end itself; then it is closed.
    """
    has_last_step = False
    try:
        async for results in generator:
            for stream, result in zip(streams, as_results(name, results, len(streams)), strict=True):
                if not stream.is_read:
                    continue
                if is_end(result):
                    stream.end()
                elif isinstance(result, BaseException):
                    stream.end(raisable(result))
                else:
                    await stream.put(result)
            if not any(stream.is_read for stream in streams):
                if has_last_step:
                    break
                has_last_step = True
            # Let readers run, even if the generator never waits.
            await LoopClock().sleep(0)
    finally:
        await generator.aclose()
