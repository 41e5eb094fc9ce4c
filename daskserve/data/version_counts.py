"""Rules for counting the failed requests of a version; the gates of a rollout compare these counts.

Routers count the versions of a deployment (`daskserve.data.caller.routing.versions`), and replicas count the
versions of a model (`daskserve.data.replica.requests.counted`), by the same rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from daskserve.common.clock import stopwatch
from daskserve.common.types import Envelope, EnvelopeKind, Message, Receive, Send
from daskserve.context import Drawn, count_drawn, current_batch, current_replica
from daskserve.errors import ServeError, http_status_of
from daskserve.loops.deadlines import is_over
from daskserve.payload.packed_errors import known_of

T = TypeVar("T")


async def sent(
    call: Callable[[Envelope, Receive, Send], Coroutine[Any, Any, T]],
    envelope: Envelope,
    receive: Receive,
    send: Send,
    on_end: Callable[[bool], None],
) -> T:
    """Send a request; call ``on_end`` with whether the request failed, unless its caller leaves."""
    has_failed = False

    def note(message: Message) -> Awaitable[None]:
        nonlocal has_failed
        if is_failed(message):
            has_failed = True
        return send(message)

    try:
        # A WebSocket may move to another event loop; its messages then do not pass through here.
        value = await call(envelope, receive, send if is_socket(envelope) else note)
    except asyncio.CancelledError:
        if is_over(envelope.deadline, asyncio.get_running_loop().time()):
            on_end(True)
        raise
    except OSError as error:
        if isinstance(error, ServeError):
            on_end(is_fault(error))
        raise
    except Exception as error:
        on_end(is_fault(error))
        raise
    on_end(has_failed)
    return value


@contextmanager
def counted_batch() -> Iterator[list[Any]]:
    """Count the code in the block as one batch, for the versions of models that it uses.

    A batch counts once, regardless of its size: its requests get the same version, and may fail for the same
    reason. The code adds the outcomes to the yielded list. The batch has failed if one of them is an error.
    """
    replica = current_replica.get()
    if replica is None or not replica.models.splits:
        yield []
        return
    outcomes: list[Any] = []
    drawn: Drawn = {}
    token, began = current_batch.set(drawn), stopwatch()
    try:
        yield outcomes
    except Exception as error:
        outcomes.append(error)
        raise
    finally:
        current_batch.reset(token)
        errors = (each for each in outcomes if isinstance(each, Exception))
        count_drawn(drawn, any(is_fault(each) for each in errors), stopwatch() - began)


def is_failed(message: Message) -> bool:
    """Return whether a message is a whole response with 5xx, or the start of one."""
    return bool(message.get("status", 0) >= 500)


def is_socket(envelope: Envelope) -> bool:
    """Return whether a request is a WebSocket."""
    return envelope.kind is EnvelopeKind.HTTP and envelope.head.get("type") == "websocket"


def is_fault(error: BaseException) -> bool:
    """Return whether an error counts as a failure of the version, not as a mistake of its caller."""
    known = known_of(error)
    if isinstance(known, ServeError):
        return http_status_of(known) >= 500
    status = getattr(known, "status_code", None)
    return not (isinstance(status, int) and status < 500)
