"""One interface for user code of all forms, which answers requests.

A *definition* is a function, a class, an ASGI application or an import path of one of these.
`inspect_definition` inspects it without running it. `load_definition` and `Servable` run where user code
runs, so that imports, constructors and handlers may block.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import CoroutineType
from typing import Any

from daskserve.common.formatting import capitalized
from daskserve.common.types import Payload, Receive
from daskserve.data.multiplexing.unloading import silence_destructor
from daskserve.data.replica.errors.log import NOT_FAILURES, is_refusal
from daskserve.data.replica.execution.message_pipe import ClientDisconnectedError, MessagePipe
from daskserve.data.replica.user_code.class_app import as_definition, constructing, forget_endpoints
from daskserve.data.replica.user_code.definitions import CALL, Method, inspect_definition
from daskserve.data.replica.user_code.joined_response import JoinedResponse
from daskserve.data.replica.user_code.lifespan import Lifespan
from daskserve.data.replica.user_code.request_objects import HTTPRequest, legacy_argument
from daskserve.data.replica.user_code.responses import (
    ConvertedResponse,
    Unfinished,
    dump_result,
    mistaken_error,
    raised_response,
    to_response,
)
from daskserve.errors import BadRequestError
from daskserve.loops.tasks import pause
from daskserve.payload import pickling
from daskserve.payload.importing import MODULE_REMEDY, import_definition
from daskserve.payload.parcels import unpack_code

logger = logging.getLogger("daskserve.replica")


# ---- loading


def load_definition(
    code: bytes,
    parts: Sequence[Any] = (),
    *,
    display_name: str,
    is_debug: bool = False,
    is_exact: bool = False,
) -> Servable:
    """Return the servable in `daskserve.options.start_messages.ReplicaStart.code`, not yet constructed.

    ``parts`` are the parts of the parcel, if there is one. Errors contain the ``display_name``. With
    ``is_exact``, the files of an import path must be those that were deployed.
    """
    try:
        *_, definition, init_args, init_kwargs = unpack_code(code, parts, is_exact=is_exact)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}. {MODULE_REMEDY}", name=error.name) from error
    if isinstance(definition, str):
        definition = import_definition(definition, is_exact=is_exact)
        if isinstance(definition, str):
            raise BadRequestError(
                f"An import path must name something to serve, not the text {definition!r}."
            )
    return Servable(
        as_definition(definition),
        tuple(init_args),
        dict(init_kwargs or {}),
        display_name=display_name,
        is_debug=is_debug,
    )


# ---- serving


class Servable:
    """User code that answers requests.

    Sync methods run through the ``..._in_thread`` methods in a user-code thread, coroutine functions on the
    user-code event loop; `Method.is_async` selects between them. On the worker's loop, only the properties
    are used.
    """

    def __init__(
        self,
        definition: Any,
        init_args: tuple[Any, ...],
        init_kwargs: dict[str, Any],
        *,
        display_name: str = "the deployment",
        is_debug: bool = False,
    ) -> None:
        self.facts = inspect_definition(definition, init_args, init_kwargs)
        self.methods = self.facts.methods
        self.is_debug = is_debug
        #: The user's object, once it is constructed.
        self.target: Any = None
        #: Whether the replica is stopping, so that an object is destructed right after its constructor.
        self.is_ending = False
        # The first caller that acquires this lock calls the destructor.
        self._claim = threading.Lock()
        self._definition = definition
        self._init_args = init_args
        self._init_kwargs = init_kwargs
        self._display_name = display_name
        self._bound: dict[str, Callable[..., Any]] = {}
        self._descriptions = {name: f"Method {name} of {display_name}" for name in self.methods}
        self._lifespan = Lifespan()

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self._definition)

    @property
    def is_plain_at_all(self) -> bool:
        """Whether any of its methods answers requests in threads."""
        return any(not method.is_async for method in self.methods.values())

    @property
    def is_async_at_all(self) -> bool:
        """Whether any of its methods runs on an event loop, on which the object is then also constructed."""
        return any(method.is_async for method in self.methods.values()) or self.must_be_made_on_loop

    @property
    def must_be_made_on_loop(self) -> bool:
        return self.is_class and inspect.iscoroutinefunction(self._definition.__init__)

    @property
    def must_be_closed_on_loop(self) -> bool:
        return self._lifespan.is_open or self._is_destructor_async

    @property
    def _is_destructor_async(self) -> bool:
        # Found in the class, as Python does: an object with `__getattr__` may answer to any name, or raise.
        return inspect.iscoroutinefunction(getattr(type(self.target), "__del__", None))

    def method(self, name: str) -> Method:
        """Return a public method; the `BadRequestError` for any other name lists the public ones."""
        method = self.methods.get(name)
        if method is None:
            raise BadRequestError(
                f"{capitalized(self._display_name)} has no public method {name!r}; "
                f"it has: {', '.join(sorted(self.methods))}."
            )
        if method.is_asgi:
            raise BadRequestError(
                f"{capitalized(self._display_name)} is an ASGI application: send it HTTP requests, not calls."
            )
        return method

    def bound(self, method: Method) -> Callable[..., Any]:
        """Return the callable of a method, bound to the user's object."""
        return self._bound[method.name]

    def describe(self, method: Method) -> str:
        """Return the description of a method for an error."""
        return self._descriptions[method.name]

    def hook(self, name: str) -> Callable[..., Any]:
        """Return a method that only daskserve calls; raise `BadRequestError` if there is none."""
        hook = getattr(self.target, name, None) if self.is_class else None
        if not callable(hook):
            raise BadRequestError(f"The callable of {self._display_name} has no {name}() method.")
        return hook  # type: ignore[no-any-return]

    def has_hook(self, name: str) -> bool:
        """Return whether the user's class has a method that only daskserve calls; runs no user code."""
        hook = inspect.getattr_static(type(self.target), name, None) if self.is_class else None
        return callable(getattr(hook, "__func__", hook))

    def check_batching(self, max_batch_size: int | None) -> None:
        """Raise `BadRequestError` if the batch size requires batches, but the callable takes none."""
        if max_batch_size is not None and max_batch_size > 1 and not self.facts.accepts_batches:
            raise BadRequestError(
                f"max_batch_size is {max_batch_size}, but the callable does not take batches: mark it with "
                "@accept_batch, or leave max_batch_size unset."
            )

    # ---- from constructor to destructor

    def construct_in_thread(self) -> None:
        if not self.is_class:
            self._adopt(self._definition)
            return
        with constructing(self._definition) as join:
            made = self._definition(*self._init_args, **self._init_kwargs)
            join(made)
        self._adopt(made)

    async def construct(self) -> None:
        if self.must_be_made_on_loop:
            await self._construct()
            return
        self.construct_in_thread()
        if self.is_ending:  # the constructor has blocked the loop
            with suppress(asyncio.CancelledError):
                await pause()  # takes up the cancellation, which the destructor must not get
            await self.close()

    async def _construct(self) -> None:
        with constructing(self._definition) as join:
            made = self._definition.__new__(self._definition, *self._init_args, **self._init_kwargs)
            self.target = made  # from here on, stopping the replica runs the object's destructor
            try:
                await made.__init__(*self._init_args, **self._init_kwargs)
            except Exception:
                self.target = None
                raise
            join(made)
        self._adopt(made)

    def _adopt(self, made: Any) -> None:
        self.target = made
        self._bound = {name: getattr(made, name) if self.is_class else made for name in self.methods}

    async def open(self) -> None:
        """Run the start-up half of an ASGI application's lifespan."""
        await self._lifespan.open(self._bound[CALL])

    async def close(self) -> None:
        """End the lifespan and release the user's object; call its ``__del__``, which may be async."""
        await self._lifespan.close()
        if self._is_destructor_async:
            made = self._release()
            if made is not None:
                try:
                    await made.__del__()
                finally:
                    silence_destructor(made)
        else:
            self.close_in_thread()

    def close_late(self) -> None:
        """Release an object whose constructor has ended after its replica stopped, in a thread."""
        if self._is_destructor_async:
            asyncio.run(self.close())
        else:
            self.close_in_thread()

    def close_in_thread(self) -> None:
        """Release the user's object; call its ``__del__``, even if other code still refers to the object."""
        made = self._release()
        if self.is_class and hasattr(type(made), "__del__"):
            try:
                made.__del__()
            finally:
                silence_destructor(made)

    def _release(self) -> Any:
        if self.target is None or not self._claim.acquire(blocking=False):
            return None
        made, self.target, self._bound = self.target, None, {}
        if self.facts.is_asgi_app:
            forget_endpoints()
        return made

    # ---- HTTP

    async def answer_app(self, scope: MutableMapping[str, Any], pipe: MessagePipe) -> ConvertedResponse:
        """Let an ASGI application answer."""
        scope["state"] = self._lifespan.state.copy()
        if scope["type"] != "http":
            with suppress(ClientDisconnectedError):
                await self._bound[CALL](scope, pipe.receive, pipe.send)
            return ConvertedResponse()
        response = JoinedResponse(pipe, scope)
        try:
            await self._bound[CALL](scope, pipe.receive, response.send)
            # An application need not answer once its client has disconnected.
            if not pipe.is_started and response.held is None and not pipe.is_closed:
                raise RuntimeError("The ASGI application returned without a response.")
            await response.end()
            return ConvertedResponse()
        except Exception as error:
            failure = mistaken_error(error) or error
            if not is_refusal(failure):
                await response.end()
            if not pipe.is_started and isinstance(failure, NOT_FAILURES):
                return raised_response(failure)
        finally:
            response.drop()
        try:
            raise failure
        finally:
            del failure  # otherwise the traceback refers to this frame, and this frame to the error

    async def answer_http(
        self, method: Method, scope: MutableMapping[str, Any], receive: Receive, body: bytes | None
    ) -> ConvertedResponse | Unfinished:
        """Let an async callable answer; ``body`` is the whole body, or None if it has not arrived."""
        try:
            if method.takes_argument:
                request = HTTPRequest(scope, receive)
                request.whole_body = body
                result = self._bound[method.name](request)
            else:
                result = self._bound[method.name]()
            return to_response(await result if type(result) is CoroutineType else result)
        except NOT_FAILURES as error:
            return raised_response(error)

    def answer_http_in_thread(
        self,
        method: Method,
        scope: MutableMapping[str, Any],
        receive: Receive,
        has_disconnected: Callable[[], bool],
        body: bytes,
    ) -> ConvertedResponse | Unfinished:
        """Let a plain callable answer a request whose whole body has arrived."""
        try:
            if method.takes_argument:
                request = HTTPRequest(scope, receive)
                request.whole_body = body
                request.has_disconnected = has_disconnected
                return to_response(self._bound[method.name](request))
            return to_response(self._bound[method.name]())
        except NOT_FAILURES as error:
            return raised_response(error)

    # ---- calls

    async def answer_call(self, method: Method, head: Mapping[str, Any], payload: Payload | None) -> Payload:
        """Let an async method answer a Python call."""
        args, kwargs = call_arguments(method, head, payload)
        result = self._bound[method.name](*args, **kwargs)
        if type(result) is not CoroutineType:
            return await self.finish_call(method, result)
        value = await result
        if hasattr(type(value), "__await__"):  # a Dask future, which plain methods may also return
            return await self.finish_call(method, value)
        return dump_result(self.describe(method), value)

    def answer_call_in_thread(
        self, method: Method, head: Mapping[str, Any], payload: Payload | None
    ) -> Payload | Unfinished:
        """Let a plain method answer a Python call."""
        args, kwargs = call_arguments(method, head, payload)
        result = self._bound[method.name](*args, **kwargs)
        return (
            Unfinished(result) if inspect.isawaitable(result) else dump_result(self.describe(method), result)
        )

    async def finish_call(self, method: Method, result: Any) -> Payload:
        """Pickle the result of a call; await it first if it is awaitable."""
        if inspect.isawaitable(result):
            result = await result
        return dump_result(self.describe(method), result)


def call_arguments(
    method: Method, head: Mapping[str, Any], payload: Payload | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the positional and keyword arguments for a method."""
    args, kwargs = ((), {}) if payload is None else payload.load()
    if not head.get("legacy"):
        return args, kwargs
    return ((legacy_argument(head, args, kwargs),) if method.takes_argument else ()), {}


def run_hook_in_thread(hook: Callable[..., Any], *pickles: bytes) -> Any:
    """Call a hook with unpickled arguments; return its result, which may be a coroutine."""
    return hook(*map(pickling.load_bytes, pickles))


async def run_hook(hook: Callable[..., Any], *pickles: bytes) -> Any:
    """Call an async hook with unpickled arguments; return its awaited result."""
    return await run_hook_in_thread(hook, *pickles)
