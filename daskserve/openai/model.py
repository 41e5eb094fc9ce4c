"""The deployment of one model, which runs an engine and has the parts that all engines share."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from daskserve.errors import RequestTimeoutError, ServeError
from daskserve.openai.engine import EmbeddingRequest, Embeddings, Engine, GenerationRequest, text_of
from daskserve.openai.errors import ContextLengthError, InvalidRequestError
from daskserve.openai.generation import Piece, pieces
from daskserve.payload.importing import import_definition

#: The tokens of prompts with more characters are counted in a thread.
LONG_PROMPT = 10_000
#: The greatest number that a vector may contain: base64 encodes floats of four bytes.
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


class ModelServer:
    """A replica of a model.

    Parameters
    ----------
    engine : class, function or str
        The class of the `Engine`, or a function that makes one, or an import path.
    args : dict
        Keyword arguments for it.
    token_timeout_s : float, optional
        How long to wait for each token.
    """

    def __init__(self, engine: Any, args: Mapping[str, Any], token_timeout_s: float | None) -> None:
        make = import_definition(engine) if isinstance(engine, str) else engine
        self._engine: Engine = make(**args)
        self._token_timeout_s = token_timeout_s
        if not callable(getattr(self._engine, "generate", None)) and not hasattr(self._engine, "embed"):
            raise TypeError(
                f"An engine has a method generate(request), or embed(request), or both; {make!r} returned "
                f"{self._engine!r}"
            )

    # ---- called by the server

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Piece | str]:
        """Yield the pieces of an answer."""
        if not hasattr(self._engine, "generate"):
            raise InvalidRequestError(f"The model {request.model!r} does not generate text.", param="model")
        count = await self._check_length(request)
        tokens = self._engine.generate(request)
        made = pieces(tokens, request, token_timeout_s=self._token_timeout_s, prompt_tokens=count)
        async with aclosing(made) as stream:  # type: ignore[type-var]
            async for piece in stream:
                yield piece

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the vectors of texts."""
        embed = getattr(self._engine, "embed", None)
        if embed is None:
            raise InvalidRequestError(
                f"The model {request.model!r} does not create embeddings.", param="model"
            )
        try:
            async with asyncio.timeout(self._token_timeout_s) as limit:
                found = await _call(embed, request)
        except TimeoutError:
            if not limit.expired():
                raise
            raise RequestTimeoutError(
                f"The model has produced no vectors for {self._token_timeout_s} s."
            ) from None
        made = found if isinstance(found, Embeddings) else Embeddings(found)
        # Checked here, so that the model logs the error.
        vectors = [[float(number) for number in vector] for vector in made.vectors]
        if len(vectors) != len(request.inputs):
            raise TypeError(f"embed returned {len(vectors)} vectors for {len(request.inputs)} texts")
        beyond = next((one for vector in vectors for one in vector if not abs(one) <= MAX_FLOAT32), None)
        if beyond is not None:
            raise ValueError(f"embed returned {beyond!r} in a vector, which does not fit in a 4-byte float")
        return Embeddings(vectors, int(made.prompt_tokens))

    async def _check_length(self, request: GenerationRequest) -> int:
        """Return the length of the prompt; raise `ContextLengthError` if it is too long."""
        count_tokens = getattr(self._engine, "count_tokens", None)
        if count_tokens is None:
            return 0
        if _size(request) > LONG_PROMPT:
            count = await asyncio.to_thread(count_tokens, request)
        else:
            count = count_tokens(request)
        if inspect.isawaitable(count):
            count = await count
        limit: int | None = getattr(self._engine, "context_length", None)
        if limit is None:
            return int(count)
        asked = request.max_tokens or 0
        if count >= limit or count + asked > limit:
            name = "prompt" if request.messages is None else "messages"
            raise ContextLengthError(
                f"The maximum context length of this model is {limit} tokens. You requested {count + asked}: "
                f"{count} in the {name}, {asked} in the completion. Shorten the {name} or the completion.",
                param=name,
            )
        if request.max_tokens is None:
            request.max_tokens = limit - count
        return int(count)

    # ---- called by the replica

    async def check_health(self) -> None:
        """Call the engine's ``check_health``, if it has one."""
        check = getattr(self._engine, "check_health", None)
        if check is not None:
            await _call(check)

    async def reconfigure(self, user_config: Any) -> None:
        """Pass the ``user_config`` of the deployment to the engine."""
        reconfigure = getattr(self._engine, "reconfigure", None)
        if reconfigure is None:
            raise ServeError(
                f"The deployment has a user_config, but the engine {type(self._engine).__name__} has no "
                "method reconfigure."
            )
        await _call(reconfigure, user_config)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the engine's own measurements, or those of its continuous batch."""
        record = getattr(self._engine, "record_autoscaling_stats", None)
        if record is not None:
            return dict(await _call(record))
        stats = getattr(getattr(self._engine, "generate", None), "stats", None)
        if stats is None:
            return {}
        found = stats()
        return {
            "tokens_waiting": found.queued_cost,
            "tokens_active": found.active_cost,
            "requests_waiting": found.queued,
            "requests_active": found.active,
        }


async def _call(function: Any, *args: Any) -> Any:
    """Call a function of the engine: on the loop if it is async, otherwise in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    found = await asyncio.to_thread(function, *args)
    return await found if inspect.isawaitable(found) else found


def _size(request: GenerationRequest) -> int:
    if request.messages is None:
        return len(request.prompt or ())
    return sum(len(text_of(each)) for each in request.messages)
