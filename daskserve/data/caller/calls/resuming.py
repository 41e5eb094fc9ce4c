"""Streams that go on at another replica if theirs is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from daskserve.common.clock import LoopClock
from daskserve.data.caller.calls.handle import Handle
from daskserve.errors import BackPressureError, UnavailableError


async def resume_stream(
    handle: Handle, *args: Any, max_resumes: int = 3, **kwargs: Any
) -> AsyncIterator[Any]:
    """Yield the outputs of a stream that can be resumed; if its replica is lost, another one goes on.

    The method is one of `continuous_batch`, or another generator that takes ``resume_from``: a list of the
    outputs so far, after which it goes on. The first call does not pass it.

    Parameters
    ----------
    handle : Handle
        The handle of the method, such as ``handle.generate``.
    max_resumes : int
        How often the stream may be resumed, refusals by full replicas included; then the error is raised.

    Examples
    --------
    >>> async def __call__(self, request):
    ...     return serve.handle.resume_stream(self.model.generate, await request.json())
    """
    outputs = list(kwargs.pop("resume_from", ()))
    stream_handle = handle.options(stream=True)
    resumes = 0
    while True:
        more = {"resume_from": list(outputs)} if outputs else {}
        stream = stream_handle.remote(*args, **kwargs, **more)
        try:
            async for output in stream:
                outputs.append(output)
                yield output
            return
        except (UnavailableError, BackPressureError) as error:
            # A stream that begins may be refused; one that goes on waits for the replicas that are left.
            pause_s = error.retry_after_s if isinstance(error, BackPressureError) else 0.0
            if not error.is_retryable or resumes >= max_resumes or (pause_s and not outputs):
                raise
            resumes += 1
        finally:
            stream.cancel()
        await LoopClock().sleep(pause_s)
