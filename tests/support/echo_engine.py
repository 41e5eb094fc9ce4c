"""An engine for tests of the OpenAI-compatible server: it answers with the words of the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import daskserve as serve
from daskserve.context import current_request
from daskserve.errors import BackPressureError
from daskserve.openai import (
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    ModelNotFoundError,
    Token,
    ToolCall,
    text_of,
)


class Echo:
    """Commands among the words: ``fail``, ``busy``, ``hang``, ``slow``."""

    context_length = 50

    def __init__(self) -> None:
        self.open = 0
        self.seen: list[GenerationRequest] = []

    def count_tokens(self, request: GenerationRequest) -> int:
        request.tokens = _text(request).split()
        return len(request.tokens)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Any]:
        self.seen = [*self.seen[-9:], request]
        self.open += 1
        try:
            if request.tools:
                name = request.tools[0]["function"]["name"]
                yield Token(tool_calls=[ToolCall(0, "call_1", name, '{"a":')])
                yield Token(tool_calls=[ToolCall(0, arguments=" 1}")])
                return
            for word in request.tokens:
                await self._obey(word)
                if request.logprobs is None:
                    yield f"{word} "
                else:
                    others = (("x", float("-inf")),)
                    yield Token(f"{word} ", logprob=-0.5, top_logprobs=others[: request.logprobs])
        finally:
            self.open -= 1

    async def _obey(self, word: str) -> None:
        if word == "fail":
            raise RuntimeError("secret")
        if word == "busy":
            raise BackPressureError("too many", retry_after_s=7)
        if word == "slow":
            await asyncio.sleep(0.05)
        if word == "hang":
            await asyncio.sleep(3600)

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        if "one too few" in request.inputs:
            return Embeddings([])
        vectors = [[1.5, float(len(each))][: request.dimensions] for each in request.inputs]
        return Embeddings(vectors, prompt_tokens=sum(len(each) for each in request.inputs))

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"open": self.open}


class Adapted:
    """Answers with the names of adapters and how many it has loaded so far; each name has an even length."""

    def __init__(self) -> None:
        self.loads = 0

    @serve.multiplexed(max_num_models_per_replica=2)
    async def adapter(self, name: str) -> str:
        if len(name) % 2:
            raise ModelNotFoundError(f"There is no adapter {name!r}.")
        self.loads += 1
        return name.upper()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[str]:
        adapter = await self.adapter(request.adapter) if request.adapter else "none"
        yield f"{adapter} {self.loads}"


def _text(request: GenerationRequest) -> str:
    if request.messages is not None:
        return text_of(request.messages[-1])
    return request.prompt if isinstance(request.prompt, str) else " ".join(map(str, request.prompt or ()))


class Witness:
    """Answers with its replica, and with the session and the priority of the request."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[str]:
        present = current_request.get()
        assert present is not None
        yield f"{serve.get_replica_context().replica_tag} {present.session_id} {present.priority}"

    def embed(self, request: EmbeddingRequest) -> list[list[float]]:
        present = current_request.get()
        assert present is not None
        return [[float(present.idempotent), float(present.priority)]]
