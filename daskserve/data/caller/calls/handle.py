"""Handles, with which Python code calls an endpoint, and the responses that the calls return.

A handle works in any process that can reach the cluster: a user program, a replica, a Dask task. A handle is
pickled by name, and connects to the cluster of the process that unpickles it. Its router runs on the event
loop of that process's connection. Callers may use any thread or loop.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from html import escape
from typing import Any, Literal, cast, overload

from daskserve.cluster.protocols.base import ClusterConnection, Process, RemoteValues
from daskserve.cluster.worker.current import find_connection
from daskserve.common.clock import stopwatch
from daskserve.common.types import (
    DEFAULT_APPLICATION,
    Envelope,
    EnvelopeKind,
    KeptPayload,
    Message,
    Payload,
    Receive,
    Send,
    described,
    nothing_to_receive,
    short_tag,
    split_deployment_tag,
)
from daskserve.context import current_request
from daskserve.data.caller.calls.broadcast import BroadcastResponse, ReplicaOutcome, send_to_all
from daskserve.data.caller.calls.call import Call, Facts, ShutDown, head_of, identity_of, pack
from daskserve.data.caller.calls.call_options import CallOptions
from daskserve.data.caller.calls.naming import caller_here, late_text
from daskserve.data.caller.calls.pending import begin_call, start_call, waiter_for
from daskserve.data.caller.calls.replica_choice import ReplicaChoice, ReplicaSelection
from daskserve.data.caller.calls.response import Response, response_class
from daskserve.data.caller.calls.response_stream import Pipe, ResponseGenerator
from daskserve.data.caller.mapping.methods import BatchCalls
from daskserve.data.caller.routing.named_priorities import check_priority, wait_and_check_priority
from daskserve.data.caller.routing.router import Router, Routers
from daskserve.data.caller.routing.waiting_calls import waiting_calls_of
from daskserve.errors import (
    BadRequestError,
    BlockingCallError,
    ClosedError,
    MethodNotFoundError,
    StreamOptionError,
)
from daskserve.internals import ipython
from daskserve.loops.deadlines import until
from daskserve.loops.pending_call import PendingCall
from daskserve.telemetry.collector import PROCESS
from daskserve.telemetry.tracing.carrier import TRACE


async def routers_of(cluster: Process) -> Routers:
    """Return the routers of a process for an instance; the first call creates and starts them."""
    routers: Routers | None = cluster.shared.get("routers")
    if routers is None:
        routers = Routers(
            cluster,
            cluster.listener,
            cluster.clock,
            cluster.connection.rng,
            cluster.routes,
            waiting_calls_of(cluster),
            cluster.shared,
        )
        cluster.shared["routers"] = routers
        PROCESS.add(routers)
    if not cluster.listener.is_started:
        await routers.start()
    return routers


class Handle(BatchCalls):
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
        self._response_class = response_class(options.result)
        if ipython.shell() is not None:
            self._facts = {**(self._facts or {}), "is_shown": True}
        self._cluster = cluster
        self._caller = caller_here()

    def __repr__(self) -> str:
        route, method = self._known_route(), self._options.method_name
        return f"<Handle of {short_tag(self._endpoint)!r} route={route!r} method={method!r}>"

    def _repr_html_(self) -> str:
        """Return a table that describes the handle, for notebooks."""
        rows = {
            "handle of": short_tag(self._endpoint),
            "route": self._known_route() or "none, by handle only",
            "methods": ", ".join(self._known_methods() or ()),
            **{name: repr(value) for name, value in self._options.differences()},
        }
        cells = (f"<th>{escape(name)}</th><td>{escape(text)}</td>" for name, text in rows.items() if text)
        return f"<table>{''.join(f'<tr>{each}</tr>' for each in cells)}</table>"

    @property
    def deployment_name(self) -> str:
        """The name of the deployment or endpoint that the calls go to."""
        return self._endpoint if self._is_legacy else split_deployment_tag(self._endpoint)[1]

    @property
    def app_name(self) -> str:
        """The name of the deployment's application."""
        return DEFAULT_APPLICATION if self._is_legacy else split_deployment_tag(self._endpoint)[0]

    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self._is_legacy, self._known_methods(), self._known_route())
        return (_rebuild, (self._instance, self._endpoint, *facts, self._options))

    def __getattr__(self, name: str) -> Handle:
        if "_python_methods" not in self.__dict__:
            raise AttributeError(name)  # the object is being unpickled
        methods = self._known_methods()
        if name in methods if methods is not None else not name.startswith("_"):
            return self.options(method_name=name)
        if self._is_legacy:
            raise MethodNotFoundError(
                f"A handle has no attribute {name!r}; to call another method of the backend, use "
                f"handle.options(method_name={name!r}).remote(...)."
            )
        known = ", ".join(methods or ()) or "none"
        whose = described(self._endpoint, "Deployment")
        raise MethodNotFoundError(f"{whose} has no method {name!r}; it has: {known}.")

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
        # Not a public name, because a method of the deployment could have it.
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
                f"The handle of {short_tag(self._endpoint)!r} is an argument of a deployment; it can be "
                "called only where the deployment runs."
            )
        if self._cluster is None:
            self._cluster = find_connection().cluster(self._instance)
        return self._cluster

    def remote(self, /, *args: Any, **kwargs: Any) -> Response:
        """Start a call and return its `Response`.

        The arguments are pickled before this returns, so later changes to them have no effect. Arrays of
        1 MiB and more arrive read-only.
        """
        return self._response_class(*self._start(args, kwargs), self._cluster or self._process)

    # ---- chosen replicas, all replicas

    def choose_replica(self, *args: Any, **kwargs: Any) -> ReplicaChoice:
        """Return an async context manager that reserves a slot at a replica and yields a `ReplicaSelection`.

        The replica is chosen as for a call, but the call's arguments are not considered. Pass the selection
        to `dispatch`. An unused slot is free again at the end of the block.

        Examples
        --------
        >>> async with handle.choose_replica() as selection:  # doctest: +SKIP
        ...     answer = await handle.dispatch(selection, 1)
        """
        cluster, options = self._process, self._options
        request_id, deadline, facts = identity_of(options, self._facts, cluster, current_request.get())
        head = {"method": "", "request_id": request_id, "reserve": True, "stream": options.stream}
        head |= head_of(facts or {})
        envelope = Envelope(EnvelopeKind.CALL, head, deadline=deadline)
        envelope.model_id = options.multiplexed_model_id

        async def reserve(receive: Receive, send: Send) -> None:
            router = await self._known_router(cluster)
            sending = router.send(envelope, receive, send, shard_key=options.shard_key or options.session_id)
            if deadline is not None:
                late = late_text(request_id, self._endpoint, is_legacy=self._is_legacy)
                sending = until(deadline, sending, late)
            await sending

        owner = (self._instance, self._endpoint)
        return ReplicaChoice(owner, cluster.connection, reserve, is_stream=options.stream)

    def dispatch(self, selection: ReplicaSelection, *args: Any, **kwargs: Any) -> Response:
        """Call the replica that `choose_replica` has chosen, in its reserved slot, like `remote`.

        Raises
        ------
        ValueError
            Another handle's selection, or none.
        RuntimeError
            The slot was used or released before.
        ReplicaUnavailableError
            The replica has stopped, or was lost.
        """
        return self._response_class(*self._dispatch(selection, args, kwargs), self._process)

    def _dispatch(
        self,
        selection: ReplicaSelection,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pipe: Pipe | None = None,
    ) -> tuple[PendingCall[Any], ClusterConnection, str]:
        cluster, connection, current = self._process, self._process.connection, current_request.get()
        choice = selection.choice if isinstance(selection, ReplicaSelection) else None
        if choice is None or choice.owner != (self._instance, self._endpoint):
            raise BadRequestError(
                f"{selection!r} was not chosen by a handle of {short_tag(self._endpoint)!r} in this process; "
                "use the selection that `async with handle.choose_replica()` yields."
            )
        if choice.is_stream is not self._options.stream:
            raise StreamOptionError("Choose the replica with the same option `stream` as the call.")
        request_id, deadline, facts = identity_of(self._options, self._facts, cluster, current)
        payload, values = pack(self._options, connection, args, kwargs)
        future: PendingCall[Any] = PendingCall()
        choice.claim(future, None if pipe is None else pipe.put)

        async def make_message() -> Message:
            head, filled = await self._settled(cluster, request_id, facts, payload, values, pipe is not None)
            return {"type": "call.dispatch", "head": head, "payload": filled}

        late = late_text(request_id, self._endpoint, is_legacy=self._is_legacy)
        choice.send(make_message(), deadline, late)
        if current is not None:
            current.add_call(future)
        return future, connection, request_id

    def broadcast(self, method_name: str, *args: Any, **kwargs: Any) -> BroadcastResponse:
        """Call a method of every running replica, without queues and limits; see `BroadcastResponse`."""
        handle = self.options(method_name=method_name, stream=False)
        cluster, connection, current = self._process, self._process.connection, current_request.get()
        request_id, deadline, facts = identity_of(self._options, self._facts, cluster, current)
        payload, values = pack(self._options, connection, args, kwargs)

        async def send() -> Sequence[ReplicaOutcome]:
            head, filled = await handle._settled(cluster, request_id, facts, payload, values, False)
            router = await self._known_router(cluster)
            head |= {"broadcast": True, "stream": False}
            return await send_to_all(
                cluster, await router.replicas(), Envelope(EnvelopeKind.CALL, head, filled, deadline)
            )

        future = start_call(connection, send())
        if current is not None:
            current.add_call(future)
        return BroadcastResponse(future, connection, request_id)

    # ---- shutdown

    def shutdown(self) -> None:
        """Stop watching the endpoint in this process; later calls of the handle fail.

        Calls that were made continue. Other handles of the endpoint work as before.
        """
        connection = self._process.connection
        if connection.runs_here():
            raise BlockingCallError("shutdown() would block the event loop; await shutdown_async().")
        start_call(connection, self._shut_down()).result()

    async def shutdown_async(self) -> None:
        """Stop watching the endpoint in this process; `shutdown` for event loops."""
        connection = self._process.connection
        await waiter_for(connection, start_call(connection, self._shut_down()))

    async def _shut_down(self) -> None:
        routers: Routers | None = self._process.shared.get("routers")
        if routers is not None:
            routers.forget(self._endpoint)
        self._cluster = cast(Process, ShutDown(self._endpoint))

    # ---- one call

    def _start(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], pipe: Pipe | None = None
    ) -> tuple[PendingCall[Any], ClusterConnection, str]:
        """Start a call and return its future, its connection and its id; the items of a stream go into
        ``pipe``."""
        connection = self._process.connection
        current = current_request.get()
        request_id, deadline, facts = identity_of(self._options, self._facts, self._process, current)
        payload, values = pack(self._options, connection, args, kwargs)
        future: PendingCall[Any] = PendingCall()
        if deadline is None and pipe is None and values is None:
            if connection.is_closed:
                raise connection.closed_error()
            if connection.runs_here():
                self._send_direct(payload, request_id, facts, future)
            else:
                connection.thread_calls.post(self._send_direct, payload, request_id, facts, future)
        else:
            put = None if pipe is None else pipe.put
            call = self._call(payload, request_id, facts, deadline, put, values, future)
            if deadline is not None:
                call = until(deadline, call, late_text(request_id, self._endpoint, is_legacy=self._is_legacy))
            start_call(connection, call, future)
        if current is not None:
            current.add_call(future)
        return future, connection, request_id

    def _send_direct(
        self,
        payload: Payload,
        request_id: str,
        facts: Facts,
        future: PendingCall[Payload | KeptPayload],
    ) -> None:
        """Send a call directly, or start a task if the call has to wait; runs on the connection's loop."""
        if future.cancelled():
            return
        cluster = self._process
        routers: Routers | None = cluster.shared.get("routers")
        try:
            if routers is not None and not cluster.is_ended:
                router = routers.router(self._endpoint)
                replicas = router.only  # set only if the endpoint is known and exists
                # A call with a trace goes through `Router.send`, which makes its spans.
                if replicas is not None and (facts is None or TRACE not in facts):
                    if type(self._options.priority) is str and replicas.max_queued is not None:
                        check_priority(self._options.priority, replicas)
                    head = self._head(router, request_id, facts)
                    envelope = Envelope(EnvelopeKind.CALL, head, payload, call=future)
                    envelope.model_id = self._options.multiplexed_model_id
                    if Call(cluster.connection, router, envelope, future, self._caller).start(replicas):
                        return
        except Exception as error:  # the caller gets the error
            future.set_error(error)
            return
        call = self._call(payload, request_id, facts, None, None, None, future)
        begin_call(cluster.connection, call, future)

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
            head |= head_of(facts)
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
        head, payload = await self._settled(cluster, request_id, facts, payload, values, put is not None)
        router = await self._known_router(cluster)
        envelope = Envelope(EnvelopeKind.CALL, head, payload, deadline, call=future)
        envelope.model_id = self._options.multiplexed_model_id
        if values is not None and router.has_choice:
            envelope.places = await values.places()
        shard_key = self._options.shard_key or self._options.session_id

        def send(keep: Send) -> Coroutine[Any, Any, None]:
            return router.send(envelope, nothing_to_receive, put or keep, shard_key=shard_key)

        return await Call(cluster.connection, router, envelope, future, self._caller).respond(send)

    async def _settled(
        self,
        cluster: Process,
        request_id: str,
        facts: Facts,
        payload: Payload,
        values: RemoteValues | None,
        is_stream: bool,
    ) -> tuple[dict[str, Any], Payload]:
        """Return the head and the arguments of a call once all values among them exist."""
        began = stopwatch()
        if values is not None:
            await values.wait()
            payload = values.payload
        waited_s = stopwatch() - began
        router = await self._known_router(cluster)
        head = self._head(router, request_id, facts)
        if values is not None:
            router.calls_of(self._caller).argument_waits.observe(waited_s)
            head |= {"stream": is_stream, "values": values.keys}
        elif is_stream:
            head["stream"] = True
        return head, payload

    async def _known_router(self, cluster: Process) -> Router:
        if cluster.is_ended:
            raise ClosedError(
                f"Instance {self._instance!r} has been shut down; get a new handle from a running instance."
            )
        with waiting_calls_of(cluster):
            router = (await routers_of(cluster)).router(self._endpoint)
            if not router.is_known:
                await router.wait_until_known()
            if type(self._options.priority) is str:
                await wait_and_check_priority(self._options.priority, router)
        return router


class StreamHandle(Handle):
    """A handle that calls generators; ``handle.options(stream=True)`` returns one."""

    def remote(self, /, *args: Any, **kwargs: Any) -> ResponseGenerator:  # type: ignore[override]
        """Start a call and return a `ResponseGenerator` of its items; otherwise like `Handle.remote`."""
        pipe = Pipe()
        return ResponseGenerator(pipe, *self._start(args, kwargs, pipe))

    def dispatch(self, selection: ReplicaSelection, *args: Any, **kwargs: Any) -> ResponseGenerator:  # type: ignore[override]
        """Call a chosen replica and return a `ResponseGenerator`; otherwise like `Handle.dispatch`."""
        pipe = Pipe()
        return ResponseGenerator(pipe, *self._dispatch(selection, args, kwargs, pipe))


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
