"""Tasks over HTTP: an ASGI application that submits, shows and cancels tasks, and streams their progress."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from daskserve.common.clock import LoopClock
from daskserve.common.formatting import shown
from daskserve.data.tasks.adapter import POLL_S, TaskProcessorAdapter, made_adapter
from daskserve.data.tasks.config import TaskProcessorConfig, TaskResult
from daskserve.data.tasks.errors import TaskConflictError
from daskserve.data.tasks.marks import CONSUMER
from daskserve.data.tasks.states import ENDED, TaskState
from daskserve.errors import BadRequestError, BodyTooLargeError, NotFoundError, ServeError
from daskserve.options.fields.priority import MAX_PRIORITY

MAX_WAIT_S = 300.0
#: Interval of comments in a stream without events, so that proxies do not close it.
HEARTBEAT_S = 15.0
#: The maximum size of a body if the queue sets none.
MAX_BODY = 1_048_576
_SCALARS = (str, int, float, type(None))


class _UnsupportedMediaTypeError(BadRequestError):
    http_status = 415


class TaskAPI:
    """The ASGI application of one queue; see `task_api`."""

    def __init__(
        self,
        config: TaskProcessorConfig | None,
        handlers: tuple[str, ...] | None = None,
        adapter: TaskProcessorAdapter | None = None,
    ) -> None:
        self._config, self._handlers, self._given = config, handlers, adapter
        self._made: tuple[Router, TaskProcessorAdapter] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._made is None:
            adapter = self._given
            if adapter is None:
                adapter = await asyncio.to_thread(self._connected)
            if self._made is None:  # another request may have created it first
                self._made = self._router(), adapter
        await self._made[0](scope, receive, send)

    def _connected(self) -> TaskProcessorAdapter:
        assert self._config is not None
        adapter = made_adapter(self._config)
        adapter.initialize()
        return adapter

    def _router(self) -> Router:
        routes = [
            Route("/tasks/{name}", _answering(self._submit), methods=["POST"]),
            Route("/tasks/{id}", _answering(self._status), methods=["GET"]),
            Route("/tasks/{id}", _answering(self._cancel), methods=["DELETE"]),
            Route("/tasks/{id}/events", _answering(self._events), methods=["GET"]),
            Route("/{path:path}", _answering(_no_path)),
        ]
        return Router(routes, redirect_slashes=False)

    @property
    def _adapter(self) -> TaskProcessorAdapter:
        assert self._made is not None
        return self._made[1]

    # ---- the requests

    async def _submit(self, request: Request) -> Response:
        name = request.path_params["name"]
        if self._handlers is not None and name not in self._handlers:
            raise NotFoundError(f"No handler has the name {name!r}; there are: {', '.join(self._handlers)}.")
        wait_s = _number(request, "wait_s", 0.0, MAX_WAIT_S)
        options: dict[str, Any] = {}
        if "idempotency-key" in request.headers:
            options["id"] = _checked_id(request.headers["idempotency-key"])
        if "delay_s" in request.query_params:
            options["delay_s"] = _number(request, "delay_s", 0.0, 10**9)
        if "priority" in request.query_params:
            priority = _number(request, "priority", -MAX_PRIORITY, MAX_PRIORITY)
            options["priority"] = int(priority) if priority.is_integer() else priority
        args, kwargs = await self._arguments(request)
        found = await self._adapter.enqueue_task_async(name, args, kwargs, **options)
        if wait_s:
            found = await self._adapter.wait_for_task_async(found.id, wait_s)
        root = request.scope.get("root_path", "").rstrip("/")
        headers = {"location": f"{root}/tasks/{quote(found.id, safe='')}"}
        return _json(_shown(found), 200 if _has_ended(found) else 202, headers)

    async def _arguments(self, request: Request) -> tuple[list[Any], dict[str, Any]]:
        config = getattr(self._given, "config", self._config)
        limit = getattr(getattr(config, "adapter_config", None), "max_payload_bytes", MAX_BODY)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise BodyTooLargeError(f"The body exceeds {limit} bytes; store the data elsewhere.")
        if not body:
            return [], {}
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A web page of another site can submit a form as text, but not as JSON.
        if kind != "application/json" and not kind.endswith("+json"):
            raise _UnsupportedMediaTypeError(f"The body must be application/json, not {kind[:100]!r}.")
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"The body is not JSON: {error}") from None
        if isinstance(value, dict):
            return [], value
        if isinstance(value, list):
            return value, {}
        raise BadRequestError("The body must be an object of keyword arguments, or an array of arguments.")

    async def _status(self, request: Request) -> Response:
        id, wait_s = request.path_params["id"], _number(request, "wait_s", 0.0, MAX_WAIT_S)
        return _json(_shown(await self._adapter.wait_for_task_async(id, wait_s)))

    async def _cancel(self, request: Request) -> Response:
        id = request.path_params["id"]
        if not await self._adapter.cancel_task_async(id):
            found = await self._adapter.get_task_status_async(id)
            raise TaskConflictError(f"Task {id!r} is {found.status}, so it cannot be cancelled.")
        return _json(_shown(await self._adapter.get_task_status_async(id)), 202)

    async def _events(self, request: Request) -> Response:
        first = await self._adapter.get_task_status_async(request.path_params["id"])
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._event_stream(first), media_type="text/event-stream", headers=headers)

    async def _event_stream(self, found: TaskResult) -> AsyncIterator[str]:
        clock = LoopClock()
        before, sent_at = "", clock.now()
        while True:
            text = json.dumps(_shown(found))
            if text != before:
                kind = "end" if _has_ended(found) else "progress"
                yield f"event: {kind}\ndata: {text}\n\n"
                before, sent_at = text, clock.now()
            elif clock.now() - sent_at > HEARTBEAT_S:
                yield ": waiting\n\n"
                sent_at = clock.now()
            if _has_ended(found):
                return
            await clock.sleep(POLL_S)
            try:
                found = await self._adapter.get_task_status_async(found.id)
            except ServeError as error:
                yield f"event: error\ndata: {json.dumps(_error(error))}\n\n"
                return


def task_api(consumer: type[Any] | TaskProcessorConfig | TaskProcessorAdapter) -> TaskAPI:
    """Return an ASGI application that offers a queue of tasks over HTTP.

    - ``POST /tasks/{handler}`` with a JSON object (or array) of arguments submits a task: 202, with its
      ``id`` and a ``Location``. The header ``Idempotency-Key`` sets the id, so that a repeated request does
      not submit a second task. The query may have ``delay_s``, ``priority`` and ``wait_s``.
    - ``GET /tasks/{id}`` returns its status and result; ``?wait_s=30`` waits up to 30 s for its end.
    - ``GET /tasks/{id}/events`` streams its status and progress as server-sent events.
    - ``DELETE /tasks/{id}`` cancels it.

    Parameters
    ----------
    consumer : type, TaskProcessorConfig or TaskProcessorAdapter
        The class with `task_consumer`, or the config of the queue. With a class, unknown handlers are
        refused. In a program outside of the instance that keeps the queue, pass the adapter that
        `instantiate_adapter_from_config` returns.

    Examples
    --------
    >>> serve.run(serve.tasks.task_api(Mail), name="mail-api", route_prefix="/mail")  # doctest: +SKIP
    """
    if isinstance(consumer, TaskProcessorConfig):
        return TaskAPI(consumer)
    if isinstance(consumer, TaskProcessorAdapter):
        return TaskAPI(None, adapter=consumer)
    is_class = isinstance(consumer, type)  # otherwise it is a deployment
    spec = getattr(consumer if is_class else getattr(consumer, "definition", None), CONSUMER, None)
    if spec is None:
        raise TypeError(
            f"task_api takes a class with @serve.tasks.task_consumer, or its config; got {consumer!r:.100}"
        )
    return TaskAPI(spec.config, tuple(sorted(spec.handlers)))


def _answering(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except ServeError as error:
            headers = {"retry-after": "1"} if error.is_retryable else {}
            return _json(_error(error), error.http_status, headers)

    return endpoint


async def _no_path(request: Request) -> Response:
    raise NotFoundError(f"There is nothing at {request.url.path}; tasks are at /tasks/.")


def _number(request: Request, name: str, least: float, most: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise BadRequestError(f"{name} is {text!r:.100}; give a number from {shown(least)} to {shown(most)}.")
    return value


def _checked_id(id: str) -> str:
    if not id or "/" in id:
        raise BadRequestError(f"Idempotency-Key is {id!r:.100}; give a text without slashes.")
    return id


def _has_ended(found: TaskResult) -> bool:
    return found.status in ENDED


def _shown(found: TaskResult) -> dict[str, Any]:
    """Return the JSON form of a task, without its traceback, which may reveal internals."""
    shown = {
        "id": found.id,
        "status": found.status,
        "created_at": found.created_at,
        "attempts": found.attempts,
        "progress": _in_json(found.progress),
    }
    if found.status == TaskState.DONE:
        shown["result"] = _in_json(found.result)
    elif found.result is not None:
        shown["error"] = str(found.result)
    return shown


def _in_json(value: Any) -> Any:
    """Return a value in types that JSON has; a value with too many levels, or a cycle, becomes a string."""
    try:
        return _plain(value)
    except RecursionError:
        return f"<a {type(value).__name__} that contains itself, or is nested too deeply for JSON>"


def _plain(value: Any) -> Any:
    """Return a value in types that JSON has: arrays as lists, NaN and infinity as null, others as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, dict):
        names = ((key if isinstance(key, _SCALARS) else str(key), each) for key, each in value.items())
        return {name: _plain(each) for name, each in names}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return _plain(value.model_dump(mode="json")) if hasattr(value, "model_dump") else str(value)


def _error(error: ServeError) -> dict[str, Any]:
    return {"error": {"type": type(error).__name__.lstrip("_"), "message": str(error)}}


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(value), status, headers=headers, media_type="application/json")
