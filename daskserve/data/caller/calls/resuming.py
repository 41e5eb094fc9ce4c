"""Streams that continue at another replica if theirs is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from daskserve.common.clock import LoopClock
from daskserve.data.caller.calls.handle import Handle
from daskserve.errors import BackPressureError, UnavailableError


async def resume_stream(
    handle: Handle, *args: Any, max_resumes: int = 3, **kwargs: Any
) -> AsyncIterator[Any]:
    """Yield the outputs of a stream; if its replica is lost, another replica continues the stream.

    The method must be one of `continuous_batch`, or a generator that takes ``resume_from``: the list of the
    outputs so far, after which it continues. The first call does not pass it.

    Parameters
    ----------
    handle : Handle
        The handle of the method, such as ``handle.generate``.
    max_resumes : int
        Maximum number of resumptions, including refusals by full replicas; then the error is raised.

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
            # A new stream may be refused; a stream that has begun waits for the remaining replicas.
            pause_s = error.retry_after_s if isinstance(error, BackPressureError) else 0.0
            if not error.is_retryable or resumes >= max_resumes or (pause_s and not outputs):
                raise
            resumes += 1
        finally:
            stream.cancel()
        await LoopClock().sleep(pause_s)
