"""Handles, with which Python code calls an endpoint, and the responses that the calls return.

A handle works in any process that can reach the cluster: a user program, a replica, a Dask task. A handle is
pickled by name and connects to the cluster of the process that unpickles it. Its router runs on the event
loop of that process's link. Callers may be on any thread or loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal, TypeAlias, overload

from daskserve.clock import stopwatch
from daskserve.cluster.base import Link, Process, RemoteValues
from daskserve.cluster.present import find_link
from daskserve.context import current_request
from daskserve.data.caller.call_options import CallOptions
from daskserve.data.caller.chaining import chained_arguments
from daskserve.data.caller.direct_call import DirectCall, no_answer_error
from daskserve.data.caller.pending import begin_call, pause, start_call
from daskserve.data.caller.response import Response
from daskserve.data.caller.response_stream import Pipe, ResponseGenerator
from daskserve.data.caller.router import Router, Routers
from daskserve.errors import ActorLostError, ClosedError, PassedResponseError, ReplicaBusyError
from daskserve.figures.collector import PROCESS
from daskserve.loops.deadlines import earliest, is_over, until
from daskserve.loops.pending_call import PendingCall
from daskserve.payload import PackedError, load_error, may_mention_dask
from daskserve.serialization import serialize
from daskserve.types import (
    DONE,
    Envelope,
    EnvelopeKind,
    KeptPayload,
    Message,
    Payload,
    Send,
    nothing_to_receive,
)

#: What a call tells user code about its request: the ids of `CallOptions`, and the route.
Facts: TypeAlias = Mapping[str, str] | None


async def routers_of(cluster: Process) -> Routers:
    """Return the routers of a process for an instance; the first call creates and starts them."""
    routers: Routers | None = cluster.shared.get("routers")
    if routers is None:
        routers = Routers(cluster, cluster.listener, cluster.clock, cluster.link.rng)
        cluster.shared["routers"] = routers
        PROCESS.add(routers)
    if not cluster.listener.is_started:
        await routers.start()
    return routers


class Handle:
    """Calls an endpoint from Python. A handle is immutable; `options` returns a copy that shares the router.

    ``handle.remote(...)`` starts a call and returns its `Response` at once; ``handle.method.remote(...)``
    calls another method of a deployment.
    """

    def __init__(
        self,
        instance: str,
        endpoint: str,
        *,
        is_legacy: bool = True,
        python_methods: tuple[str, ...] | None = (),
        route: str | None = None,
        options: CallOptions | None = None,
        cluster: Process | None = None,
    ) -> None:
        self._instance = instance
        self._endpoint = endpoint
        self._is_legacy = is_legacy
        self._python_methods = python_methods
        self._route = route
        self._options = options = options or CallOptions()
        self._facts: Facts = options.carried()
        self._cluster = cluster

    def __repr__(self) -> str:
        route, method = self._known_route(), self._options.method_name
        return f"<Handle of {self._endpoint!r} route={route!r} method={method!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self._is_legacy, self._known_methods(), self._known_route())
        return (_rebuild, (self._instance, self._endpoint, *facts, self._options))

    def __getattr__(self, name: str) -> Handle:
        if "_python_methods" not in self.__dict__:
            raise AttributeError(name)  # this object is about to be unpickled
        methods = self._known_methods()
        if name in methods if methods is not None else not name.startswith("_"):
            return self.options(method_name=name)
        if self._is_legacy:
            raise AttributeError(
                f"A handle has no attribute {name!r}; to call another method of the backend, use "
                f"handle.options(method_name={name!r}).remote(...)."
            )
        known = ", ".join(methods or ()) or "none"
        raise AttributeError(f"Deployment {self._endpoint!r} has no method {name!r}; it has: {known}.")

    @overload
    def options(self, *, stream: Literal[True], **changes: Any) -> StreamHandle: ...

    @overload
    def options(self, **changes: Any) -> Handle: ...

    def options(self, **changes: Any) -> Handle:
        """Return a copy with changed `CallOptions`; options that are not named keep their values."""
        options = self._options.changed(changes)
        return _kind_of(options)(
            self._instance,
            self._endpoint,
            is_legacy=self._is_legacy,
            python_methods=self._python_methods,
            route=self._route,
            options=options,
            cluster=self._cluster,
        )

    def _known_route(self) -> str | None:
        # Not a public name: that could be a method of the deployment.
        published = self._published()
        return self._route if published is None else published.get("route")

    def _published(self) -> Any:
        routers: Routers | None = None if self._cluster is None else self._cluster.shared.get("routers")
        return None if routers is None else routers.published(self._endpoint)

    def _known_methods(self) -> tuple[str, ...] | None:
        """Return the methods of the deployment; None if they are not known yet."""
        if self._python_methods is not None:
            return self._python_methods
        published = self._published()
        return None if published is None else tuple(published["python_methods"])

    @property
    def _process(self) -> Process:
        """This process's view of the instance, resolved on first use."""
        if self._cluster is None and not self._instance:
            raise ClosedError(
                f"The handle of {self._endpoint!r} belongs to the arguments of a deployment; it can call "
                "where the deployment runs."
            )
        if self._cluster is None:
            self._cluster = find_link().cluster(self._instance)
        return self._cluster

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        """Start a call and return its `Response`.

        The arguments are pickled before this returns, so later changes to them have no effect.
        """
        return Response(*self._start(args, kwargs), self._process)

    def _start(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], pipe: Pipe | None = None
    ) -> tuple[PendingCall[Any], Link, str]:
        """Start a call and return its future, link and id; the items of a stream go into ``pipe``."""
        link = self._process.link
        options, current = self._options, current_request.get()
        request_id = (current.request_id if current is not None else "") or link.request_ids.next()
        own_s = options.timeout_s
        deadline = None if current is None else current.deadline
        if own_s is not None:
            deadline = earliest(deadline, link.loop.time() + own_s)
        values: RemoteValues | None
        try:
            payload = serialize(options.request_serialization, (args, kwargs))
        except PassedResponseError:
            values = chained_arguments(link, args, kwargs, by_reference=options.by_reference)
            payload = values.payload
        else:
            values = link.values.take(payload, args, kwargs) if may_mention_dask(payload) else None
        facts = self._facts
        if current is not None and current.route:
            facts = {**(facts or {}), "route": current.route}
        if deadline is None and pipe is None and values is None:
            future = self._start_direct(link, payload, request_id, facts)
        else:
            future = PendingCall()
            put = None if pipe is None else pipe.put
            call = self._call(payload, request_id, facts, deadline, put, values, future)
            if deadline is not None:
                call = until(deadline, call, f"Request {request_id} was not answered before its deadline.")
            start_call(link, call, future)
        if current is not None:
            current.add_call(future)
        return future, link, request_id

    def _start_direct(
        self, link: Link, payload: Payload, request_id: str, facts: Facts
    ) -> PendingCall[Payload | KeptPayload]:
        if link.is_closed:
            raise link.closed_error()
        future: PendingCall[Payload | KeptPayload] = PendingCall()
        if link.runs_here():
            self._send_direct(link, payload, request_id, facts, future)
        else:
            link.hop.post(self._send_direct, link, payload, request_id, facts, future)
        return future

    def _send_direct(
        self,
        link: Link,
        payload: Payload,
        request_id: str,
        facts: Facts,
        future: PendingCall[Payload | KeptPayload],
    ) -> None:
        """Send a call directly, or start a task if it has to wait; runs on the link's loop."""
        if future.cancelled():
            return
        cluster = self._process
        routers: Routers | None = cluster.shared.get("routers")
        try:
            if routers is not None:
                router = routers.router(self._endpoint)
                replicas = router.only  # set only if the endpoint is known and exists, and the instance runs
                if replicas is not None:
                    head = self._head(router, request_id, facts)
                    envelope = Envelope(EnvelopeKind.CALL, head, payload, call=future)
                    if DirectCall(link, router, replicas, envelope, future, self._continue_call).start(
                        cluster
                    ):
                        return
        except Exception as error:  # the caller gets it
            future.set_error(error)
            return
        begin_call(link, self._call(payload, request_id, facts, None, None, None, future), future)

    def _continue_call(self, call: DirectCall, refused: ReplicaBusyError | ActorLostError) -> None:
        """Continue a call that a replica has refused, in a task."""

        async def send(keep: Send) -> None:
            await pause()
            await call.replicas.send(call.envelope, nothing_to_receive, keep, refused=refused)

        # The call is already counted as begun, so this coroutine must start in any case to count its end.
        sending = self._send_and_record(call.router, call.envelope, send, call.began)
        begin_call(call.link, sending, call.call, pauses_itself=True)

    def _head(self, router: Router, request_id: str, facts: Facts) -> dict[str, Any]:
        options = self._options
        head: dict[str, Any] = {"method": options.method_name, "request_id": request_id}
        if router.is_legacy:
            head |= {
                "legacy": True,
                "http_method": options.http_method,
                "http_headers": dict(options.http_headers),
            }
        if facts is not None:
            head["facts"] = facts
        return head

    async def _call(
        self,
        payload: Payload,
        request_id: str,
        facts: Facts,
        deadline: float | None,
        put: Send | None,
        values: RemoteValues | None,
        future: PendingCall[Any],
    ) -> Any:
        cluster = self._process
        if values is not None:
            await values.wait()
            payload = values.payload
        if cluster.is_ended:
            raise ClosedError(
                f"Instance {self._instance!r} has been shut down; get a new handle from a running instance."
            )
        router = (await routers_of(cluster)).router(self._endpoint)
        if not router.is_known:
            await router.wait_until_known()
        head = self._head(router, request_id, facts)
        if values is not None:
            head |= {"stream": put is not None, "values": values.keys}
        elif put is not None:
            head["stream"] = True
        envelope = Envelope(EnvelopeKind.CALL, head, payload, deadline, call=future)
        router.calls.begun += 1
        shard_key = self._options.shard_key or self._options.session_id

        def send(keep: Send) -> Coroutine[Any, Any, None]:
            return router.send(envelope, nothing_to_receive, put or keep, shard_key=shard_key)

        return await self._send_and_record(router, envelope, send, stopwatch())

    async def _send_and_record(
        self,
        router: Router,
        envelope: Envelope,
        send: Callable[[Send], Coroutine[Any, Any, None]],
        began: float,
    ) -> Any:
        answers: list[Payload | KeptPayload] = []

        def keep(message: Message) -> Awaitable[None]:
            answers.append(message["payload"])
            return DONE

        metrics = router.calls
        try:
            await send(keep)
        except PackedError as packed:
            error = load_error(packed.data)
            metrics.fail(error)
            raise error from error.__cause__  # the remote traceback
        except BaseException as error:
            metrics.fail(error, is_late=is_over(envelope.deadline, self._process.clock.now()))
            raise
        finally:
            metrics.latency.observe(stopwatch() - began)
        if envelope.head.get("stream"):
            return None
        if not answers:
            raise no_answer_error(envelope)
        return answers[0]


class StreamHandle(Handle):
    """A handle that calls generators; ``handle.options(stream=True)`` returns one."""

    def remote(self, *args: Any, **kwargs: Any) -> ResponseGenerator:  # type: ignore[override]
        """Start a call and return a `ResponseGenerator` of its items; otherwise like `Handle.remote`."""
        pipe = Pipe()
        return ResponseGenerator(pipe, *self._start(args, kwargs, pipe))


def _kind_of(options: CallOptions) -> type[Handle]:
    return StreamHandle if options.stream else Handle


def _rebuild(
    instance: str,
    endpoint: str,
    is_legacy: bool,
    python_methods: tuple[str, ...] | None,
    route: str | None,
    options: CallOptions,
) -> Handle:
    return _kind_of(options)(
        instance,
        endpoint,
        is_legacy=is_legacy,
        python_methods=python_methods,
        route=route,
        options=options,
    )
