"""The steps of a handle's call that do not depend on the handle: its identity, its arguments, its outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from daskserve.cluster.protocols.base import ClusterConnection, RemoteValues
from daskserve.common.clock import Clock, stopwatch
from daskserve.common.types import DONE, Envelope, KeptPayload, Message, Payload, Send
from daskserve.context import RequestContext
from daskserve.data.caller.calls.call_options import CallOptions
from daskserve.data.caller.calls.chaining import chained_arguments
from daskserve.data.caller.calls.direct_call import no_answer_error
from daskserve.data.caller.calls.response import Response
from daskserve.data.caller.naming import with_called
from daskserve.data.caller.routing.router import Router
from daskserve.errors import PassedResponseError, ServeError
from daskserve.loops.deadlines import earliest, is_over
from daskserve.payload.pickling import dump, may_mention_dask
from daskserve.payload.serialization import DEFAULT_SERIALIZATION, serialize
from daskserve.payload.unpicklable import arguments_of, unpicklable_error


def identity_of(
    options: CallOptions, connection: ClusterConnection, current: RequestContext | None
) -> tuple[str, float | None]:
    """Return the id and the deadline of a call that the present request makes, if there is one."""
    request_id = (current.request_id if current is not None else "") or connection.request_ids.next()
    deadline = None if current is None else current.deadline
    if options.timeout_s is not None:
        deadline = earliest(deadline, connection.loop.time() + options.timeout_s)
    return request_id, deadline


def pack(
    options: CallOptions, connection: ClusterConnection, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Payload, RemoteValues | None]:
    """Serialize arguments, and take out those that do not travel with the call.

    Raises
    ------
    UnpicklableError
        An argument cannot be pickled.
    BadRequestError
        The serialization of the handle cannot hold an argument.
    """
    try:
        return _packed(options, connection, args, kwargs)
    except ServeError:
        raise
    except Exception as error:  # a foreign object may raise anything
        remedy = "Pass what it was made from, and create it where it is used."
        raise unpicklable_error(
            "An argument of the call",
            error,
            (args, kwargs),
            arguments_of(args, kwargs),
            remedy,
            lambda: _without_responses,
        ) from error


def _packed(
    options: CallOptions, connection: ClusterConnection, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Payload, RemoteValues | None]:
    serialization = options.request_serialization
    try:
        if serialization == DEFAULT_SERIALIZATION:
            payload = dump((args, kwargs))
        else:
            payload = serialize(serialization, (args, kwargs))
    except PassedResponseError:
        values = chained_arguments(connection, args, kwargs, by_reference=options.by_reference)
        return values.payload, values
    return payload, connection.values.take(payload, args, kwargs) if may_mention_dask(payload) else None


def _without_responses(value: Any) -> Any:
    return (len, ((),)) if isinstance(value, Response) else NotImplemented


async def send_and_record(
    router: Router,
    envelope: Envelope,
    send: Callable[[Send], Coroutine[Any, Any, None]],
    began: float,
    clock: Clock,
) -> Any:
    """Send a call, count its end, and return its answer; raise its error."""
    answers: list[Payload | KeptPayload] = []

    def keep(message: Message) -> Awaitable[None]:
        answers.append(message["payload"])
        return DONE

    metrics = router.calls
    try:
        await send(keep)
    except BaseException as error:
        metrics.fail(error, is_late=is_over(envelope.deadline, clock.now()))
        named = with_called(error, router.endpoint, is_legacy=router.is_legacy)
        if named is error:
            raise
        raise named from None
    finally:
        metrics.latency.observe(stopwatch() - began)
    if envelope.head.get("stream"):
        return None
    if not answers:
        raise no_answer_error(envelope)
    return answers[0]
