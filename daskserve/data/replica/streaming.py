"""Streaming calls: what a generator of user code yields, to a caller by handle, item by item.

The caller asks for it (``head["stream"]``), and each item is one ``call.item`` message. Items cross the wall
as the messages of an HTTP response do (`daskserve.data.replica.crossing.Exchange`): ahead of need, but only
so far, so that a generator waits for a slow caller. Async generators run on the user's loop, plain ones in
one of the user's threads. A caller that leaves has the generator closed where it next waits or yields.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from typing import Any

from daskserve.data.replica.conversion import dump_result
from daskserve.data.replica.crossing import Exchange, open_exchange
from daskserve.data.replica.definitions import Method
from daskserve.data.replica.servable import Servable, as_own_trouble, call_arguments
from daskserve.data.replica.wall import Call, Wall
from daskserve.errors import ActorLostError, ReplicaBusyError, StreamOptionError
from daskserve.types import Envelope, Message, Payload, Send, nothing_to_receive

#: ``begin(context, in_thread, function, *args)`` runs user code and holds the request's slot meanwhile.
Begin = Callable[..., Call[Any]]


async def stream_call(
    wall: Wall,
    servable: Servable,
    method: Method,
    envelope: Envelope,
    send: Send,
    begin: Begin,
    context: contextvars.Context,
) -> None:
    """Send what a method yields; return when it has ended.

    Raises
    ------
    StreamOptionError
        The method takes batches, or what it returned is no stream.
    Exception
        What user code raised, after the items that it yielded before.
    """
    name = servable.describe(method)
    if method.accepts_batches:
        raise StreamOptionError(f"{name} takes batches of requests and cannot be called with stream=True.")
    exchange = open_exchange(wall, {"type": "call"}, nothing_to_receive, send)
    answer: Any = _answer if method.is_async else _answer_in_thread
    call = begin(
        context, not method.is_async, answer, servable, method, envelope.head, envelope.payload, exchange
    )
    rest = await exchange.carry(call)
    while rest is not None:
        # Async code may return what only a thread should run, and the other way round.
        in_thread = isinstance(rest, Iterator)
        finish: Any = _finish_in_thread if in_thread else _finish
        rest = await exchange.carry(begin(context.copy(), in_thread, finish, name, rest, exchange))


# ---- on the user's side


async def _answer(
    servable: Servable, method: Method, head: Mapping[str, Any], payload: Payload | None, exchange: Exchange
) -> Any:
    return await _finish(servable.describe(method), _call(servable, method, head, payload), exchange)


def _answer_in_thread(
    servable: Servable, method: Method, head: Mapping[str, Any], payload: Payload | None, exchange: Exchange
) -> Any:
    return _finish_in_thread(servable.describe(method), _call(servable, method, head, payload), exchange)


def _call(servable: Servable, method: Method, head: Mapping[str, Any], payload: Payload | None) -> Any:
    try:
        args, kwargs = call_arguments(method, head, payload)
        return servable.bound(method)(*args, **kwargs)
    except (ReplicaBusyError, ActorLostError) as error:
        raise as_own_trouble(error) from error


async def _finish(name: str, result: Any, exchange: Exchange) -> Any:
    """Send the items of an async generator; return what is for a thread instead."""
    try:
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, Iterator):
            return result
        _check(name, result)
        try:
            async for item in result:
                await exchange.send(_item(name, item))
        finally:
            if isinstance(result, AsyncGenerator):
                await result.aclose()
    except (ReplicaBusyError, ActorLostError) as error:
        raise as_own_trouble(error) from error


def _finish_in_thread(name: str, result: Any, exchange: Exchange) -> Any:
    """Send the items of a plain generator, blocking while the caller is slow; or return what needs a loop."""
    if not isinstance(result, Iterator):
        if not inspect.isawaitable(result):
            _check(name, result)
        return result
    try:
        for item in result:
            if not exchange.send_from_thread(_item(name, item)):
                break
    except (ReplicaBusyError, ActorLostError) as error:
        raise as_own_trouble(error) from error
    finally:
        if isinstance(result, Generator):
            result.close()
    return None


def _item(name: str, item: Any) -> Message:
    return {"type": "call.item", "payload": dump_result(name, item)}


def _check(name: str, result: Any) -> None:
    if not isinstance(result, AsyncIterator):
        raise StreamOptionError(
            f"{name} was called with stream=True and returned a {type(result).__name__}, no generator; call "
            "it without."
        )
