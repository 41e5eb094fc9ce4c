"""The deployment that answers HTTP requests in OpenAI's form, with the deployments of the models."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from daskserve.common.clock import LoopClock
from daskserve.context import current_request
from daskserve.errors import ServeError
from daskserve.openai.completions import (
    ChatFormat,
    CompletionFormat,
    Format,
    as_piece,
    gathered,
    json_text,
)
from daskserve.openai.errors import (
    ModelNotFoundError,
    UnsupportedMediaTypeError,
    error_answer,
    error_body,
)
from daskserve.openai.merging import called, merged
from daskserve.openai.objects import EmbeddingList, ModelCard, ModelList
from daskserve.openai.requests import ChatBody, CompletionBody, EmbeddingBody
from daskserve.openai.responses import ResponseBody, ResponseFormat

logger = logging.getLogger("daskserve.openai")

#: The paths of completions, each with its body, the format of the response, and the prefix of its id.
KINDS: Mapping[str, tuple[Any, Any, str]] = {
    "/v1/chat/completions": (ChatBody, ChatFormat, "chatcmpl-"),
    "/v1/completions": (CompletionBody, CompletionFormat, "cmpl-"),
    "/v1/responses": (ResponseBody, ResponseFormat, "resp_"),
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model."""

    adapters: tuple[str, ...] = ()
    owned_by: str = "daskserve"


class OpenAIServer:
    """Serves ``/v1/models``, chat and plain completions, responses and embeddings.

    Parameters
    ----------
    handles : mapping
        The handle of each model, by its name.
    facts : mapping
        Properties of each model, by name.
    """

    def __init__(self, handles: Mapping[str, Any], facts: Mapping[str, ModelFacts]) -> None:
        self._handles = dict(handles)
        self._facts = dict(facts)
        self._created = int(LoopClock().wall())
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/embeddings", self._embed, methods=["POST"]),
            *(Route(path, partial(self._complete, kind), methods=["POST"]) for path, kind in KINDS.items()),
            Route("/{path:path}", self._no_path, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router(scope, receive, send)

    # ---- models

    async def _models(self, request: Request) -> Response:
        return _json(ModelList(object="list", data=[self._card(each) for each in self._names()]).as_text())

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            self._find(name)
        except ModelNotFoundError as error:
            return _failure(error)
        return _json(self._card(name).as_text())

    def _names(self) -> list[str]:
        """Return the names of all models and their adapters."""
        return [
            name
            for model, facts in self._facts.items()
            for name in (model, *(f"{model}:{each}" for each in facts.adapters if each != "*"))
        ]

    def _card(self, name: str) -> ModelCard:
        owner = self._facts[self._find(name)[0]].owned_by
        return ModelCard(id=name, object="model", created=self._created, owned_by=owner)

    def _find(self, name: str) -> tuple[str, str]:
        """Return the model and the adapter that a name selects; raise `ModelNotFoundError` if there is
        none."""
        if name in self._facts:
            return name, ""
        for model in sorted(self._facts, key=len, reverse=True):
            adapters, wanted = self._facts[model].adapters, name[len(model) + 1 :]
            if wanted and name.startswith(f"{model}:") and ("*" in adapters or wanted in adapters):
                return model, wanted
        raise ModelNotFoundError(f"The model {name[:200]!r} does not exist.")

    # ---- completions

    async def _complete(self, kind: tuple[Any, Any, str], request: Request) -> Response:
        body_type, format_type, prefix = kind
        try:
            body = body_type.parse(await _read(request))
            model, adapter = self._find(body.model)
            generations = body.generations()
            handle = self._handle(model, adapter, stream=True).generate
        except ServeError as error:
            return _failure(error)
        request_id = _request_id()
        head = {"id": f"{prefix}{request_id}", "created": int(LoopClock().wall()), "model": body.model}
        made = format_type(body, head)
        for each in generations:
            each.model, each.adapter, each.request_id = body.model, adapter, request_id
        try:
            numbered = merged(await called(handle.remote, generations))
        except Exception as error:
            return _failure(error)
        if body.stream:
            return await self._stream(numbered, made)
        async with aclosing(numbered):  # type: ignore[type-var]
            try:
                return _json(_written(made.whole, await gathered(numbered, len(generations))))
            except Exception as error:
                return _failure(error)

    def _handle(self, model: str, adapter: str, **options: Any) -> Any:
        # Calls for an adapter go to replicas that have it, if the engine loads it with `multiplexed`. Calls
        # of a session go where the model's request router sends them.
        options["multiplexed_model_id"] = adapter
        if (current := current_request.get()) is not None:
            options |= {"session_id": current.session_id, "priority": current.priority_number}
        return self._handles[model].options(**options)

    async def _stream(self, numbered: AsyncIterator[tuple[int, Any]], made: Format) -> Response:
        # An error before the first token becomes the status of the response.
        try:
            first = await anext(numbered)
        except Exception as error:
            return _failure(error)
        return EventStream(numbered, _events(first, numbered, made))

    async def _embed(self, request: Request) -> Response:
        try:
            body = EmbeddingBody.parse(await _read(request))
            model, adapter = self._find(body.model)
            asked = body.request()
            asked.model, asked.adapter, asked.request_id = body.model, adapter, _request_id()
            # Marked as idempotent, so that the hedging of the model's deployment applies.
            found = await self._handle(model, adapter, idempotent=True).embed.remote(asked)
            return _json(
                _written(lambda: EmbeddingList.of(found, body.model, body.encoding_format).as_text())
            )
        except Exception as error:
            return _failure(error)

    async def _no_path(self, request: Request) -> Response:
        text = f"Unknown request URL: {request.method} {request.url.path}."
        return _json(json_text(error_body(text, "invalid_request_error", code="unknown_url")), 404)


class EventStream(StreamingResponse):
    """A stream of events that closes its source, even if the client leaves before the first event."""

    def __init__(self, source: Any, events: AsyncIterator[str]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source):
            await super().__call__(scope, receive, send)


async def _events(
    first: tuple[int, Any], numbered: AsyncIterator[tuple[int, Any]], made: Format
) -> AsyncIterator[str]:
    item: tuple[int, Any] | None = first
    try:
        while item is not None:
            yield _written(made.chunks, item[0], as_piece(item[1]))
            item = await anext(numbered, None)
        yield _written(made.end)
    except Exception as error:
        # Without this event, the client would treat the response as complete.
        yield "".join(made.failure(error_answer(error, _request_id())[1]))


def _written(write: Callable[..., Iterable[str]], *args: Any) -> str:
    """Return the text of a response; log errors, because no model has logged them."""
    try:
        return "".join(write(*args))
    except Exception:
        logger.exception("An answer cannot be written.")
        raise


async def _read(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaTypeError(f"The body must be application/json, not {kind[:100]!r}.")
    return await request.body()


def _request_id() -> str:
    current = current_request.get()
    return "" if current is None else current.request_id


def _json(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(text, status, headers=headers, media_type="application/json")


def _failure(error: Exception) -> Response:
    status, body, headers = error_answer(error, _request_id())
    return _json(json_text(body), status, headers)
