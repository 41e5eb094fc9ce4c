"""The interface of an engine: user code that makes the tokens of one model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class GenerationRequest:
    """A request to an engine: one answer to a conversation or a prompt.

    Attributes
    ----------
    model : str
        The name of the model, as the client sent it.
    adapter : str
        The part of the name after the model's own, as in ``"base:adapter"``; empty for the model itself.
    messages : list of dict, optional
        The conversation, in OpenAI's form, oldest message first. None if there is a ``prompt``.
    prompt : str or list of int, optional
        The text or the tokens to complete.
    max_tokens : int, optional
        Maximum number of tokens; the server reads no more. None: the engine decides.
    stop : tuple of str
        Strings that end the answer. The server looks for them, also across tokens; an engine may ignore them.
    logprobs : int, optional
        How many alternatives to report for each token; 0 is the token itself, None no probabilities.
    choice : int
        The number of this answer among those to the same prompt. ``seed`` already includes it.
    tools, tool_choice, response_format : optional
        As the client sent them.
    extra : dict
        Fields of the request that the server does not know.
    tokens : any
        ``count_tokens`` may store the tokens of the prompt here for ``generate``.
    """

    model: str = ""
    adapter: str = ""
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    choice: int = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None
    request_id: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    tokens: Any = None


@dataclass(slots=True)
class ToolCall:
    """A part of a tool call that the model requests.

    The first part of each call has its ``id`` and ``name``; ``arguments`` are pieces of JSON text, which the
    client puts together. ``index`` numbers the calls of an answer.
    """

    index: int = 0
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Token:
    """One output of an engine. A plain `str` is short for ``Token(text)``.

    Attributes
    ----------
    text : str
        May be empty, such as for half of a character.
    logprob : float, optional
        The natural logarithm of its probability.
    top_logprobs : sequence of (str, float)
        The most likely tokens at this place.
    tool_calls : sequence of ToolCall
        Parts of calls of tools.
    finish_reason : str, optional
        Why the answer ends with this token: ``"stop"``, ``"length"``, ``"tool_calls"`` or
        ``"content_filter"``. Without it, the answer ends when the engine stops.
    count : int
        How many tokens this output counts as in the usage.
    prompt_tokens : int, optional
        The length of the prompt, if it was not known before.
    data : any
        Any data of the engine, such as the number of the token.
    """

    text: str = ""
    logprob: float | None = None
    top_logprobs: Sequence[tuple[str, float]] = ()
    tool_calls: Sequence[ToolCall] = ()
    finish_reason: str | None = None
    count: int = 1
    prompt_tokens: int | None = None
    data: Any = None


@dataclass(slots=True)
class Embeddings:
    """Vectors of texts, in order, and how many tokens the texts have."""

    vectors: Sequence[Sequence[float]]
    prompt_tokens: int = 0


@dataclass(slots=True)
class EmbeddingRequest:
    """A request to an engine's ``embed``: texts, or lists of tokens."""

    model: str = ""
    adapter: str = ""
    inputs: Sequence[str | list[int]] = ()
    dimensions: int | None = None
    user: str | None = None
    request_id: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """Makes the tokens of a model. Each replica constructs one, with the ``args`` of its model.

    ``generate`` is an async generator, or a method with ``@serve.batching.continuous_batch``. It is closed
    when the answer is complete, when the client disconnects, and when a token takes too long. The following
    members are optional:

    ``count_tokens(request)``
        Returns the length of the prompt. With an attribute ``context_length``, the server refuses prompts
        that are too long.
    ``embed(request)``
        Returns `Embeddings`, or a list of vectors, for `EmbeddingRequest`. Plain functions run in a thread.
    ``check_health()``, ``reconfigure(user_config)``, ``record_autoscaling_stats()``
        As in any deployment.
    """

    def generate(self, request: GenerationRequest, /) -> AsyncIterator[Token | str]:
        """Yield the tokens of an answer."""


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message of a conversation, whose content may be a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (each.get("text") for each in parts if isinstance(each, Mapping))
    return "".join(each for each in texts if isinstance(each, str))
