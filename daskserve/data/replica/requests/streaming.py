"""Streaming calls: the caller gets the items of user code's generator one by one.

A call with ``head["stream"]`` requests a stream, and each item is one ``call.item`` message. Items cross the
thread boundary like the messages of an HTTP response
(`daskserve.data.replica.execution.message_pipe.MessagePipe`): up to a limit they are buffered, then the
generator waits for its caller. Async generators run on the user-code loop, plain ones in user-code
threads. When the caller leaves, the generator is closed at its next ``await`` or ``yield``.

All of these functions run on the user's side of the executor.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping
from typing import Any

from daskserve.common.types import Message, Payload
from daskserve.data.replica.execution.message_pipe import MessagePipe
from daskserve.data.replica.user_code.definitions import Method
from daskserve.data.replica.user_code.responses import Unfinished, dump_result
from daskserve.data.replica.user_code.servable import Servable, call_arguments
from daskserve.errors import StreamOptionError


async def stream(
    servable: Servable, method: Method, head: Mapping[str, Any], payload: Payload | None, pipe: MessagePipe
) -> Unfinished | None:
    """Call an async method and send its items, like `finish_stream`."""
    return await finish_stream(servable.describe(method), _call(servable, method, head, payload), pipe)


def stream_in_thread(
    servable: Servable, method: Method, head: Mapping[str, Any], payload: Payload | None, pipe: MessagePipe
) -> Unfinished | None:
    """Call a plain method and send its items, like `finish_stream_in_thread`."""
    return finish_stream_in_thread(servable.describe(method), _call(servable, method, head, payload), pipe)


def _call(servable: Servable, method: Method, head: Mapping[str, Any], payload: Payload | None) -> Any:
    args, kwargs = call_arguments(method, head, payload)
    return servable.bound(method)(*args, **kwargs)


async def finish_stream(name: str, result: Any, pipe: MessagePipe) -> Unfinished | None:
    """Send the items of an async generator; return a plain generator unchanged, because it needs a thread.

    Raises
    ------
    StreamOptionError
        The result is not a stream.
    """
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, Iterator):
        return Unfinished(result)
    _check(name, result)
    try:
        async for item in result:
            if inspect.isawaitable(item):  # a response, which a method may also return
                item = await item
            await pipe.send(_item(name, item))
    finally:
        if isinstance(result, AsyncGenerator):
            await result.aclose()
    return None


def finish_stream_in_thread(name: str, result: Any, pipe: MessagePipe) -> Unfinished | None:
    """Send the items of a plain generator, and block while the caller is slow.

    A result of another type is returned, because it needs an event loop.
    """
    if not isinstance(result, Iterator):
        if not inspect.isawaitable(result):
            _check(name, result)
        return Unfinished(result)
    try:
        for item in result:
            if inspect.isawaitable(item) and hasattr(item, "result"):
                item = item.result()
            if not pipe.send_from_thread(_item(name, item)):
                break
    finally:
        if isinstance(result, Generator):
            result.close()
    return None


def _item(name: str, item: Any) -> Message:
    return {"type": "call.item", "payload": dump_result(name, item)}


def _check(name: str, result: Any) -> None:
    if not isinstance(result, AsyncIterator):
        raise StreamOptionError(
            f"{name} was called with stream=True and returned {type(result).__name__}, not a generator; "
            "call it without stream=True."
        )
