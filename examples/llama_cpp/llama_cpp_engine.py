"""An engine for GGUF models, by the Python binding of llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from llama_cpp import Llama

from daskserve.openai import EmbeddingRequest, Embeddings, GenerationRequest, Token, ToolCall, text_of


class LlamaCppEngine:
    """Generates with `llama_cpp.Llama`, which answers one request at a time: scale out by replicas.

    Parameters
    ----------
    **options
        Those of `Llama`, such as ``model_path``, ``n_ctx``, ``n_gpu_layers``, ``chat_format``,
        ``logits_all=True`` for probabilities and ``embedding=True`` for embeddings.
    """

    def __init__(self, **options: Any) -> None:
        self._llama = Llama(**{"verbose": False, **options})
        self._is_free = asyncio.Lock()
        self.context_length = self._llama.n_ctx()

    async def count_tokens(self, request: GenerationRequest) -> int:
        """Return the length of the prompt, without the marks of the chat format."""
        if isinstance(request.prompt, list):
            return len(request.prompt)
        text = request.prompt or "".join(text_of(each) for each in request.messages or ())
        return len(self._llama.tokenize(text.encode()))

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Token]:
        """Yield the tokens that the model makes in a thread."""
        async with self._is_free:
            chunks = await asyncio.to_thread(self._begin, request)
            try:
                while (chunk := await _next(chunks)) is not None:
                    yield token_of(chunk["choices"][0])
            finally:
                chunks.close()  # type: ignore[attr-defined]  # it is a generator

    def _begin(self, request: GenerationRequest) -> Iterator[Any]:
        options: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "stop": list(request.stop),
            "seed": request.seed,
            "stream": True,
        }
        for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty"):
            if getattr(request, name) is not None:
                options[name] = getattr(request, name)
        if request.messages is None:
            prompt: Any = request.prompt
            return iter(self._llama.create_completion(prompt, logprobs=request.logprobs, **options))
        if request.logprobs is not None:
            options |= {"logprobs": True, "top_logprobs": request.logprobs}
        messages: Any = request.messages
        return iter(
            self._llama.create_chat_completion(
                messages,
                tools=request.tools,
                tool_choice=request.tool_choice,
                response_format=request.response_format,
                **options,
            )
        )

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the vectors of texts."""
        texts: Any = list(request.inputs)
        async with self._is_free:
            made = await asyncio.to_thread(self._llama.create_embedding, texts)
        vectors: Any = [each["embedding"] for each in made["data"]]
        return Embeddings(vectors, made["usage"]["prompt_tokens"])


async def _next(chunks: Iterator[Any]) -> Any:
    """Return the next chunk; None at the end. If the caller is cancelled, the chunk is still completed."""
    making = asyncio.ensure_future(asyncio.to_thread(next, chunks, None))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])  # the model must be at rest before the next request
        raise


def token_of(choice: Any) -> Token:
    """Return the token of a choice of llama.cpp, of a chat or of a plain completion."""
    delta = choice.get("delta") or {}
    token = Token(choice.get("text") or delta.get("content") or "", finish_reason=choice["finish_reason"])
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content"):
        (found,) = logprobs["content"][:1]
        token.logprob = found["logprob"]
        token.top_logprobs = [(each["token"], each["logprob"]) for each in found["top_logprobs"]]
    elif logprobs.get("token_logprobs"):
        token.logprob = logprobs["token_logprobs"][0]
        token.top_logprobs = list((logprobs["top_logprobs"][0] or {}).items())
    token.tool_calls = [
        ToolCall(
            each.get("index", 0),
            each.get("id") or "",
            (each.get("function") or {}).get("name") or "",
            (each.get("function") or {}).get("arguments") or "",
        )
        for each in delta.get("tool_calls") or ()
    ]
    # The first chunk of a chat has the role, and the last one the reason: neither is a token.
    token.count = int(bool(token.text or token.tool_calls))
    return token
