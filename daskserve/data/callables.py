"""User code, whatever its form, as one thing that can be asked to answer requests.

A *definition* is a function, a class with ``__call__``, an ASGI application or an import path of one of
these. `inspect_definition` looks at one without running it; `load_definition` and `Servable` belong to the
user's side of the wall, where imports, constructors and handlers may take as long as they like.
"""

from __future__ import annotations

import asyncio
import copyreg
import functools
import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import CoroutineType
from typing import Any

from starlette.datastructures import State

from daskserve import payload as pickled
from daskserve.data.batching import MARK
from daskserve.data.conversion import Answer, Unfinished, dump_result, failure, to_answer
from daskserve.data.requests import Exchange, HTTPRequest, legacy_argument
from daskserve.errors import ActorLostError, BadRequestError, ReplicaBusyError, ServeError, UnavailableError
from daskserve.types import Message, Payload, Receive

logger = logging.getLogger("daskserve.replica")

CALL = "__call__"
ASGI_PARAMETERS = ("scope", "receive", "send")


def _reduce_state(state: State) -> tuple[type[State], tuple[dict[str, Any]]]:
    return State, (state._state,)


# Starlette's `State` asks itself for its dict before it has one, so unpickling it recurses without end, and
# with it every Starlette and FastAPI application. Whoever inspects a definition can also pickle it.
copyreg.pickle(State, _reduce_state)


@dataclass(frozen=True, slots=True)
class Method:
    """One thing that user code can be asked to do."""

    name: str
    is_async: bool
    takes_argument: bool
    is_asgi: bool = False
    accepts_batches: bool = False


@dataclass(frozen=True, slots=True)
class CallableFacts:
    """What a definition says of itself. The defaults hold for an import path, of which nothing is known."""

    is_blocking: bool = True
    is_asgi_app: bool = False
    accepts_batches: bool = False
    methods: Mapping[str, Method] = field(default_factory=dict)


def inspect_definition(
    definition: Any, init_args: Sequence[Any] = (), init_kwargs: Mapping[str, Any] | None = None
) -> CallableFacts:
    """Return what is known of a definition before any of it runs.

    Raises
    ------
    TypeError
        It is nothing that can be served.
    ValueError
        It takes no init arguments (it is not a class) and there are some.
    """
    if isinstance(definition, str):
        return CallableFacts()
    if inspect.isclass(definition) and _class_has(definition, CALL):
        methods = _methods_of_class(definition)
    elif callable(definition) and not inspect.isclass(definition):
        if init_args or init_kwargs:
            raise ValueError(
                f"Only a class takes init arguments; {_describe(definition)} is already made and gets none."
            )
        methods = {CALL: _method(CALL, definition, definition)}
    else:
        raise TypeError(
            "Backend definition must be a function, a class with __call__, an ASGI application or an "
            f"import path, got {_describe(definition)}"
        )
    call = methods[CALL]
    return CallableFacts(not call.is_async, call.is_asgi, call.accepts_batches, methods)


def _describe(definition: Any) -> str:
    if inspect.isclass(definition):
        return f"class {definition.__name__}"
    name = getattr(definition, "__name__", None)
    return f"{type(definition).__name__} {name}" if name else f"{type(definition).__name__}: {definition!r}"


def _class_has(cls: type, name: str) -> bool:
    # hasattr() would find the metaclass's __call__, which every class has.
    return any(name in vars(base) for base in cls.__mro__)


def _methods_of_class(cls: type) -> dict[str, Method]:
    methods = {}
    for name in dir(cls):
        value = getattr(cls, name, None)
        if (name == CALL or not name.startswith("_")) and callable(value) and not inspect.isclass(value):
            static = inspect.getattr_static(cls, name)
            is_bound = isinstance(static, (staticmethod, classmethod))
            methods[name] = _method(name, value, cls, skip=0 if is_bound else 1)
    return methods


def _method(name: str, function: Any, owner: Any, skip: int = 0) -> Method:
    positional = _positional_parameters(function)[skip:]
    is_asgi = tuple(positional[:3]) == ASGI_PARAMETERS
    return Method(
        name,
        is_async=is_asgi or is_async(function),
        takes_argument=bool(positional),
        is_asgi=is_asgi,
        accepts_batches=hasattr(function, MARK) or hasattr(owner, MARK),
    )


def _positional_parameters(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some builtins have none; assume they take the request
        return ["request"]
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    names = []
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            # Whatever has been skipped by then, there is always one more.
            names += [f"{parameter.name}{index}" for index in range(2)]
        elif parameter.kind not in kinds:
            names.append(parameter.name)
    return names


def is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = type(function).__call__  # an object made callable by its class
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


# ---- loading


def import_definition(path: str) -> Any:
    """Return what ``"pkg.mod.Name"`` or ``"pkg.mod:Name"`` names.

    Raises
    ------
    BadRequestError
        The path has another form, there is no such module, or the module has no such name. Errors inside
        the module, a missing import of its own included, are raised as they are.
    """
    module_name, colon, name = path.partition(":")
    if not colon:
        module_name, _, name = path.rpartition(".")
    if not all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")]):
        raise BadRequestError(f"Import path {path!r} must have the form 'pkg.mod.Name' or 'pkg.mod:Name'.")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise
        raise BadRequestError(f"Import path {path!r}: there is no module {missing!r} here.") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise BadRequestError(f"Import path {path!r}: {module_name} has no {name!r}.") from error
    return found


def load_definition(code: bytes, *, backend_tag: str, is_debug: bool = False) -> Servable:
    """Return the servable in `daskserve.starts.ReplicaStart.code`, not yet constructed."""
    definition, init_args, init_kwargs = pickled.load_bytes(code)
    if isinstance(definition, str):
        definition = import_definition(definition)
        if isinstance(definition, str):
            raise BadRequestError(
                f"An import path must name something to serve, not the text {definition!r}."
            )
    return Servable(
        definition, tuple(init_args), dict(init_kwargs or {}), backend_tag=backend_tag, is_debug=is_debug
    )


# ---- serving


class Lifespan:
    """An ASGI application's own start-up and shutdown, on the user's loop; null for those that have none."""

    def __init__(self) -> None:
        #: What the application keeps for its requests, as ``scope["state"]``.
        self.state: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._from_app: asyncio.Queue[Message] = asyncio.Queue()

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._task.done()

    async def open(self, app: Callable[..., Awaitable[None]]) -> None:
        """Return when the application is ready; `ServeError` if it says that it failed.

        One that raises knows no lifespan, says the protocol, and is served without.
        """
        self._task = asyncio.create_task(self._run(app))
        answer = await self._ask("lifespan.startup")
        if answer["type"] == "lifespan.startup.failed":
            raise ServeError(f"The ASGI application's start-up failed: {answer.get('message', '')}")

    async def close(self) -> None:
        """Let the application shut down."""
        if self.is_open:
            await self._ask("lifespan.shutdown")

    async def _ask(self, kind: str) -> Message:
        self._to_app.put_nowait({"type": kind})
        return await self._from_app.get()

    async def _run(self, app: Callable[..., Awaitable[None]]) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        try:
            await app(scope, self._to_app.get, self._from_app.put)
        except Exception as error:
            logger.debug("The ASGI application takes no part in the lifespan protocol: %r", error)
        finally:
            self._from_app.put_nowait({"type": "lifespan.gone"})


class Servable:
    """User code that answers requests.

    What is plain (``..._in_thread``) runs in a user's thread, what is a coroutine function on the user's
    loop; which a method needs, `Method.is_async` says. Only the properties are for the worker's loop.
    """

    def __init__(
        self,
        definition: Any,
        init_args: tuple[Any, ...],
        init_kwargs: dict[str, Any],
        *,
        backend_tag: str = "",
        is_debug: bool = False,
    ) -> None:
        self.facts = inspect_definition(definition, init_args, init_kwargs)
        self.methods = self.facts.methods
        self.is_debug = is_debug
        #: The user's object once it is made.
        self.target: Any = None
        self._definition = definition
        self._init_args = init_args
        self._init_kwargs = init_kwargs
        self._backend_tag = backend_tag
        self._bound: dict[str, Callable[..., Any]] = {}
        self._descriptions = {name: f"Method {name} of backend {backend_tag!r}" for name in self.methods}
        self._lifespan = Lifespan()

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self._definition)

    @property
    def is_plain_at_all(self) -> bool:
        """Whether any of it answers requests in threads."""
        return any(not method.is_async for method in self.methods.values())

    @property
    def is_async_at_all(self) -> bool:
        """Whether any of it runs on an event loop; then it is best made there, too."""
        return any(method.is_async for method in self.methods.values()) or self.must_be_made_on_loop

    @property
    def must_be_made_on_loop(self) -> bool:
        return self.is_class and inspect.iscoroutinefunction(self._definition.__init__)

    @property
    def must_be_closed_on_loop(self) -> bool:
        return self._lifespan.is_open or inspect.iscoroutinefunction(getattr(self.target, "__del__", None))

    def method(self, name: str) -> Method:
        """Return a method that callers may ask for; `BadRequestError` names those that they may."""
        method = self.methods.get(name)
        if method is None:
            raise BadRequestError(
                f"Backend {self._backend_tag!r} has no public method {name!r}; "
                f"it has: {', '.join(sorted(self.methods))}."
            )
        if method.is_asgi:
            raise BadRequestError(
                f"Backend {self._backend_tag!r} is an ASGI application: send it HTTP requests, not calls."
            )
        return method

    def bound(self, method: Method) -> Callable[..., Any]:
        """Return what to call for a method."""
        return self._bound[method.name]

    def describe(self, method: Method) -> str:
        """Name a method in an error."""
        return self._descriptions[method.name]

    def hook(self, name: str) -> Callable[..., Any]:
        """Return the user's ``reconfigure`` or ``check_health``; `BadRequestError` if there is none."""
        hook = getattr(self.target, name, None) if self.is_class else None
        if not callable(hook):
            raise BadRequestError(f"The callable of backend {self._backend_tag!r} has no {name}() method.")
        return hook  # type: ignore[no-any-return]

    def check_batching(self, max_batch_size: int) -> None:
        """Raise `BadRequestError` if batches of that size are wanted, and the callable takes none."""
        if max_batch_size > 1 and not self.facts.accepts_batches:
            raise BadRequestError(
                f"max_batch_size is {max_batch_size}, but the callable does not take batches: mark it with "
                "@accept_batch, or leave max_batch_size unset."
            )

    # ---- from constructor to destructor

    def construct_in_thread(self) -> None:
        made = self._definition(*self._init_args, **self._init_kwargs) if self.is_class else self._definition
        self._adopt(made)

    async def construct(self) -> None:
        if self.must_be_made_on_loop:
            made = self._definition.__new__(self._definition, *self._init_args, **self._init_kwargs)
            await made.__init__(*self._init_args, **self._init_kwargs)
            self._adopt(made)
        else:
            self.construct_in_thread()

    def _adopt(self, made: Any) -> None:
        self.target = made
        self._bound = {name: getattr(made, name) if self.is_class else made for name in self.methods}

    async def open(self) -> None:
        """Run the start-up half of an ASGI application's lifespan."""
        await self._lifespan.open(self._bound[CALL])

    async def close(self) -> None:
        """End the lifespan and let go of the user's object, awaiting an async ``__del__``."""
        await self._lifespan.close()
        made = self.target
        self.close_in_thread()
        if inspect.iscoroutinefunction(getattr(made, "__del__", None)):
            try:
                await made.__del__()
            finally:
                # Python would call it again, and nobody could await that.
                kind = type(made)
                made.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "__del__": lambda _: None})

    def close_in_thread(self) -> None:
        """Let go of the user's object; unless others hold it, its ``__del__`` runs here."""
        self._bound = {}
        self.target = None

    # ---- HTTP

    async def answer_app(self, scope: MutableMapping[str, Any], exchange: Exchange) -> Answer:
        """Let an ASGI application answer."""
        if self._lifespan.state:
            scope["state"] = dict(self._lifespan.state)
        is_http = scope["type"] == "http"
        try:
            await self._bound[CALL](scope, exchange.receive, exchange.send)
            if is_http and not exchange.is_started:
                raise RuntimeError("The ASGI application returned without a response.")
        except Exception as error:  # the user's, and logged as such
            return failure(error, is_debug=self.is_debug, is_started=exchange.is_started or not is_http)
        return Answer()

    async def answer_http(
        self, method: Method, scope: MutableMapping[str, Any], receive: Receive, body: bytes | None
    ) -> Answer | Unfinished:
        """Let an async callable answer; ``body`` is given if it is all there."""
        try:
            if method.takes_argument:
                result = self._bound[method.name](HTTPRequest(scope, receive, body))
            else:
                result = self._bound[method.name]()
            return to_answer(await result if type(result) is CoroutineType else result)
        except Exception as error:  # the user's, and logged as such
            return failure(error, is_debug=self.is_debug)

    def answer_http_in_thread(
        self, method: Method, scope: MutableMapping[str, Any], receive: Receive, body: bytes
    ) -> Answer | Unfinished:
        """Let a plain callable answer a request whose whole body is there."""
        try:
            if method.takes_argument:
                return to_answer(self._bound[method.name](HTTPRequest(scope, receive, body)))
            return to_answer(self._bound[method.name]())
        except Exception as error:  # the user's, and logged as such
            return failure(error, is_debug=self.is_debug)

    # ---- calls

    async def answer_call(self, method: Method, head: Mapping[str, Any], payload: Payload | None) -> Payload:
        """Let an async method answer a Python call."""
        try:
            args, kwargs = call_arguments(method, head, payload)
            result = self._bound[method.name](*args, **kwargs)
            if type(result) is not CoroutineType:
                return await self.finish_call(method, result)
            return dump_result(self.describe(method), await result)
        except (ReplicaBusyError, ActorLostError) as error:
            raise as_own_trouble(error) from error

    def answer_call_in_thread(
        self, method: Method, head: Mapping[str, Any], payload: Payload | None
    ) -> Payload | Unfinished:
        """Let a plain method answer a Python call."""
        try:
            args, kwargs = call_arguments(method, head, payload)
            result = self._bound[method.name](*args, **kwargs)
        except (ReplicaBusyError, ActorLostError) as error:
            raise as_own_trouble(error) from error
        return (
            Unfinished(result) if inspect.isawaitable(result) else dump_result(self.describe(method), result)
        )

    async def finish_call(self, method: Method, result: Any) -> Payload:
        """Await what a call returned, if that is what it takes, and pickle it."""
        if inspect.isawaitable(result):
            result = await result
        return dump_result(self.describe(method), result)


def call_arguments(
    method: Method, head: Mapping[str, Any], payload: Payload | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return what a method is to be called with."""
    args, kwargs = ((), {}) if payload is None else pickled.load(payload)
    if not head.get("legacy"):
        return args, kwargs
    return ((legacy_argument(head, args, kwargs),) if method.takes_argument else ()), {}


def as_own_trouble(error: Exception) -> UnavailableError:
    """Return what to raise in the place of a `ReplicaBusyError` or `ActorLostError` that user code met.

    Raised as they are, they would tell the router that *this* replica is busy or gone, and that the request
    has not begun here.
    """
    return UnavailableError(f"A call made by this backend failed: {error}")


def run_hook_in_thread(hook: Callable[..., Any], *pickles: bytes) -> Any:
    """Call a user's hook with unpickled arguments; what an async one returns is to be awaited."""
    return hook(*map(pickled.load_bytes, pickles))


async def run_hook(hook: Callable[..., Any], *pickles: bytes) -> None:
    """Call and await a user's async hook with unpickled arguments."""
    await run_hook_in_thread(hook, *pickles)
