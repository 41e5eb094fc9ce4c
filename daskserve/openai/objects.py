"""The bodies of responses. Fields that were not set are left out."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from daskserve.openai.engine import Embeddings, Token
from daskserve.openai.generation import Piece

#: The log probability of tokens that are almost impossible.
IMPOSSIBLE = -9999.0


class APIObject(BaseModel):
    """The body of a response."""

    def as_text(self) -> str:
        """Return the JSON text."""
        return self.model_dump_json(exclude_unset=True)


class Usage(APIObject):
    """The number of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, last: Sequence[Piece], per_prompt: int = 1) -> Usage:
        """Return the usage of answers, given their last pieces; ``per_prompt`` answers share a prompt."""
        prompts = range(0, len(last), per_prompt)
        prompt = sum(max(each.prompt_tokens for each in last[at : at + per_prompt]) for at in prompts)
        completion = sum(each.completion_tokens for each in last)
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class Function(APIObject):
    """The function of a tool call."""

    name: str | None = None
    arguments: str = ""


class ToolCallPart(APIObject):
    """A tool call, or a part of one."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(APIObject):
    """A message of the model, or a part of a message in a stream."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallPart] = []


class ChatChoice(APIObject):
    """One of the answers to a conversation."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class CompletionChoice(APIObject):
    """One of the texts that complete a prompt."""

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


Choice: TypeAlias = ChatChoice | CompletionChoice
CompletionKind: TypeAlias = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class Completion(APIObject):
    """The answer to a conversation or to a prompt, or a chunk of it."""

    id: str
    object: CompletionKind
    created: int
    model: str
    choices: Sequence[Choice]
    usage: Usage | None = None


class EmbeddingItem(APIObject):
    """One vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(APIObject):
    """The vectors of texts."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: dict[str, int]

    @classmethod
    def of(cls, found: Embeddings, model: str, encoding: str | None) -> EmbeddingList:
        """Return the answer with these vectors."""
        data = [
            EmbeddingItem(object="embedding", index=index, embedding=_encoded(vector, encoding))
            for index, vector in enumerate(found.vectors)
        ]
        usage = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
        return cls(object="list", data=data, model=model, usage=usage)


class ModelCard(APIObject):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(APIObject):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


def _encoded(vector: Sequence[float], encoding: str | None) -> list[float] | str:
    if encoding != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def chat_logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return the probabilities of tokens in the form of chat completions."""
    return [
        {
            **_with_bytes(each.text, each.logprob),
            "top_logprobs": [_with_bytes(*other) for other in each.top_logprobs],
        }
        for each in tokens
    ]


def _with_bytes(text: str, logprob: float | None) -> dict[str, Any]:
    encoded = list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": _finite(logprob), "bytes": encoded}


def _finite(logprob: float | None) -> float:
    """Return a number that JSON can hold; OpenAI writes -9999 for almost impossible tokens."""
    return logprob if logprob is not None and logprob > IMPOSSIBLE else IMPOSSIBLE


def completion_logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """Return the probabilities of tokens in the form of plain completions."""
    offsets = []
    for each in tokens:
        offsets.append(offset)
        offset += len(each.text)
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [_finite(each.logprob) for each in tokens],
        "top_logprobs": [{text: _finite(logprob) for text, logprob in each.top_logprobs} for each in tokens],
        "text_offset": offsets,
    }
