"""One call of a handle: its identity, facts and arguments, its path to a replica, and its outcome.

Problem: if a call never waits, its coroutine, its task and their wake-ups cost more than the connection.
Choice: the request is sent at once if a replica has room and is in this process or has an open channel.
The code that receives the answer then ends the call. A task carries a call that has to wait. It also
continues a call whose replica has no channel yet, is full after all, or was lost before the request began.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

from daskserve.cluster.protocols.base import ClusterConnection, Process, RemoteValues
from daskserve.common.clock import stopwatch, wall_ns
from daskserve.common.types import (
    DONE,
    ActorRequest,
    BackendTag,
    Envelope,
    KeptPayload,
    Load,
    Message,
    Payload,
    Send,
    nothing_to_receive,
    short_tag,
)
from daskserve.context import RequestContext
from daskserve.data.caller.calls.call_options import CallOptions
from daskserve.data.caller.calls.chaining import chained_arguments
from daskserve.data.caller.calls.naming import with_called
from daskserve.data.caller.calls.pending import begin_call
from daskserve.data.caller.calls.response import Response
from daskserve.data.caller.pool.pooled_replica import PooledReplica
from daskserve.data.caller.routing.replica_set import ReplicaSet
from daskserve.data.caller.routing.router import SAMPLING, Router
from daskserve.errors import ActorLostError, ClosedError, PassedResponseError, ReplicaBusyError, ServeError
from daskserve.loops.connection_table import LostAttempt
from daskserve.loops.deadlines import earliest, is_over
from daskserve.loops.pending_call import PendingCall
from daskserve.loops.tasks import pause
from daskserve.payload.pickling import dump, may_mention_dask
from daskserve.payload.serialization import DEFAULT_SERIALIZATION, serialize
from daskserve.payload.unpicklable import arguments_of, unpicklable_error
from daskserve.telemetry.tracing.carrier import NEW, TRACE

#: The part of a call that user code reads from its request context: the ids in `CallOptions` and the route.
#: The trace is added before the call is sent.
Facts: TypeAlias = Mapping[str, Any] | None


def identity_of(
    options: CallOptions, facts: Facts, process: Process, current: RequestContext | None
) -> tuple[str, float | None, Facts]:
    """Return the id, the deadline and the facts of a call, given the request whose code makes it."""
    connection = process.connection
    request_id = (current.request_id if current is not None else "") or connection.request_ids.next()
    deadline = None if current is None else current.deadline
    if options.timeout_s is not None:
        deadline = earliest(deadline, connection.loop.time() + options.timeout_s)
    if current is not None:
        if current.route:
            facts = {**(facts or {}), "route": current.route}
        if current.is_shown:
            facts = {**(facts or {}), "is_shown": True}
    if "opentelemetry.context" in sys.modules:
        from daskserve.telemetry.tracing.context import outgoing

        if (carrier := outgoing()) is not None:
            return request_id, deadline, {**(facts or {}), TRACE: carrier}
    # A request without a trace is not sampled, and neither are its calls.
    if current is None and (ratio := process.shared.get(SAMPLING)) and connection.rng.random() < ratio:
        facts = {**(facts or {}), TRACE: [NEW, "", "", str(wall_ns())]}
    return request_id, deadline, facts


def head_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a call's head for its facts and its trace."""
    if TRACE not in facts:
        return {"facts": facts} if facts else {}
    others = {name: value for name, value in facts.items() if name != TRACE}
    return {TRACE: facts[TRACE], **({"facts": others} if others else {})}


def pack(
    options: CallOptions, connection: ClusterConnection, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Payload, RemoteValues | None]:
    """Serialize arguments; values that are sent separately are taken out and also returned.

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
        remedy = "Pass the values to create it from, and create it where it is used."
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


class Call:
    """One call in progress, on the loop of the process's connection; `start` or `respond` begins it.

    Parameters
    ----------
    future : PendingCall
        Gets the outcome.
    caller : str
        The deployment whose code calls; "" for other code.
    """

    __slots__ = (
        "_began",
        "_calls",
        "_cancel_request",
        "_connection",
        "_envelope",
        "_future",
        "_replica",
        "_replicas",
        "_router",
    )

    _replicas: ReplicaSet  # set by `start`

    def __init__(
        self,
        connection: ClusterConnection,
        router: Router,
        envelope: Envelope,
        future: PendingCall[Payload | KeptPayload],
        caller: BackendTag = "",
    ) -> None:
        self._calls = router.calls_of(caller)
        self._connection = connection
        self._router = router
        self._envelope = envelope
        self._future = future
        self._replica: PooledReplica | None = None  # set while the replica has the request
        self._cancel_request: Callable[[], None] | None = None
        self._began = stopwatch()

    def start(self, replicas: ReplicaSet) -> bool:
        """Send the request, in a task if necessary; return False, without any effect, if it has to wait."""
        replica = replicas.take_now(self._envelope)
        if replica is None:
            return False
        self._replica = replica
        self._replicas = replicas
        cancel: Callable[[], None] | None = None
        try:
            if not replica.has_queued_request:
                cancel = replica.handle(self._envelope).start(self._on_answer)
        except ActorLostError:
            pass  # the task below finds another replica
        except BaseException:
            if self._replica is not None:  # otherwise `_on_answer` has released it
                replicas.release(replica, None, self._envelope)
            raise
        self._calls.begun += 1
        if cancel is None:
            self._replica = None
            self._continue(taken=replica)
        else:
            if self._replica is not None:  # not answered yet
                self._cancel_request = cancel
            replicas.metrics.sent += 1
            self._future.on_cancel(self._cancel_from_anywhere)
        return True

    def respond(self, send: Callable[[Send], Coroutine[Any, Any, None]]) -> Coroutine[Any, Any, Any]:
        """Return a coroutine that sends the request, counts its end, and returns its answer."""
        self._calls.begun += 1
        return self._respond(send)

    async def _respond(self, send: Callable[[Send], Coroutine[Any, Any, None]]) -> Any:
        answers: list[Payload | KeptPayload] = []

        def keep(message: Message) -> Awaitable[None]:
            answers.append(message["payload"])
            return DONE

        try:
            await send(keep)
        except BaseException as error:
            named = self._note_failure(error)
            try:
                if named is error:
                    raise
                raise named from None
            finally:
                del named  # a traceback that refers to itself would keep large arguments
        finally:
            self._calls.latency.observe(stopwatch() - self._began)
        if self._envelope.head.get("stream"):
            return None
        if not answers:
            raise _no_answer_error(self._envelope)
        return answers[0]

    def _note_failure(self, error: BaseException) -> BaseException:
        """Count a failure, and return the error with the name of the deployment that was called."""
        router = self._router
        self._calls.fail(error, is_late=is_over(self._envelope.deadline, self._connection.loop.time()))
        return with_called(error, router.endpoint, is_legacy=router.is_legacy)

    # ---- without a task

    def _cancel_from_anywhere(self) -> None:
        self._connection.thread_calls.post(self._cancel)

    def _cancel(self) -> None:
        replica, self._replica = self._replica, None
        cancel, self._cancel_request = self._cancel_request, None
        if replica is not None and cancel is not None:
            cancel()
            self._replicas.release(replica, None, self._envelope)
            self._fail(asyncio.CancelledError())

    def _on_answer(self, message: Message | None, outcome: Load | Exception | ActorRequest) -> None:
        # If sending fails, this is called before `start` has set `_cancel_request`. It is dropped because it
        # refers back to this call: a cycle would keep large arguments until the next garbage collection.
        replica, self._replica, self._cancel_request = self._replica, None, None
        assert replica is not None
        assert isinstance(outcome, (Load, BaseException))  # a call has one answer message
        self._replicas.release(replica, outcome, self._envelope)
        if type(outcome) is Load:
            if message is None:
                self._fail(_no_answer_error(self._envelope))
            else:
                self._calls.latency.observe(stopwatch() - self._began)
                self._future.set_result(message["payload"])
        elif isinstance(outcome, (ReplicaBusyError, ActorLostError)) and self._may_go_on(outcome):
            if self._future.cancelled():
                self._fail(asyncio.CancelledError())
            else:
                if isinstance(outcome, ActorLostError) and outcome.begun:
                    # The replica set decides whether it is retried, as it does for HTTP requests.
                    self._envelope = replace(
                        self._envelope, lost=LostAttempt(outcome, replica.address.worker)
                    )
                self._continue(outcome)
        else:
            self._fail(outcome)

    def _may_go_on(self, outcome: ReplicaBusyError | ActorLostError) -> bool:
        is_begun = isinstance(outcome, ActorLostError) and outcome.begun
        return not is_begun or self._envelope.is_idempotent_call()

    def _continue(
        self,
        refused: ReplicaBusyError | ActorLostError | None = None,
        taken: PooledReplica | None = None,
    ) -> None:
        """Continue a call in a task, after it has taken a replica or a replica has refused it."""
        replicas, envelope = self._replicas, self._envelope

        async def send(keep: Send) -> None:
            try:
                await pause()
            except asyncio.CancelledError:
                if taken is not None:
                    replicas.release_unused(taken, envelope)
                raise
            if refused is not None:
                replicas.metrics.note_retry(refused)
            await replicas.send(
                envelope, nothing_to_receive, keep, is_rejected=refused is not None, taken=taken
            )

        # The call is already counted as begun, so this coroutine must start in any case to count its end.
        begin_call(self._connection, self._respond(send), self._future, pauses_itself=True)

    def _fail(self, error: Any) -> None:
        named = self._note_failure(error)
        self._calls.latency.observe(stopwatch() - self._began)
        if isinstance(error, asyncio.CancelledError):
            self._future.cancel()
        else:
            self._future.set_error(named)


class ShutDown:
    """The process of a handle that was shut down; using it raises an error."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.shared: dict[str, Any] = {}

    @property
    def connection(self) -> NoReturn:
        raise ClosedError(f"This handle of {short_tag(self._endpoint)!r} was shut down; get a new one.")


def _no_answer_error(envelope: Envelope) -> ServeError:
    return ServeError(f"The replica ended request {envelope.head['request_id']} without an answer.")
