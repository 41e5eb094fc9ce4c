"""From the tokens of an engine to the pieces of an answer: stop strings, lengths, reasons, deadlines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from daskserve.errors import RequestTimeoutError
from daskserve.openai.engine import GenerationRequest, Token, ToolCall
from daskserve.openai.stopping import StopScanner


@dataclass(slots=True)
class Piece:
    """A part of an answer. The last one has a ``finish_reason``, and all have the counts so far."""

    text: str = ""
    logprobs: tuple[Token, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    completion_tokens: int = 0
    prompt_tokens: int = 0


class _Assembly:
    """The state of one answer."""

    def __init__(self, request: GenerationRequest, prompt_tokens: int) -> None:
        self._request = request
        self._scanner = StopScanner(request.stop)
        self._count = 0
        self._prompt_tokens = prompt_tokens
        self._has_tool_calls = False
        # Tokens with probabilities whose text is held back, and where it begins.
        self._waiting: deque[tuple[int, Token]] = deque()
        self._seen = 0
        self._sent = 0

    def add(self, token: Token) -> Piece:
        """Return the piece that a token makes; empty if its text is held back."""
        self._count += token.count
        if token.prompt_tokens is not None:
            self._prompt_tokens = token.prompt_tokens
        self._has_tool_calls |= bool(token.tool_calls)
        if self._request.logprobs is not None and token.logprob is not None:
            self._waiting.append((self._seen, token))
        self._seen += len(token.text)
        text = self._scanner.feed(token.text)
        limit = self._request.max_tokens
        if self._scanner.found:
            return self._piece(text, "stop", token)
        if token.finish_reason is not None or (limit is not None and self._count >= limit):
            return self._piece(text + self._scanner.end(), token.finish_reason or "length", token)
        return self._piece(text, None, token)

    def end(self) -> Piece:
        """Return the last piece of an answer that the engine has ended."""
        return self._piece(self._scanner.end(), "tool_calls" if self._has_tool_calls else "stop", None)

    def nothing(self) -> Piece:
        """Return the whole answer to a request for no tokens."""
        return self._piece("", "length", None)

    def _piece(self, text: str, reason: str | None, token: Token | None) -> Piece:
        self._sent += len(text)
        logprobs = []
        while self._waiting:
            start, waiting = self._waiting[0]
            is_sent = start + len(waiting.text) <= self._sent
            # The last piece has the tokens of which a part was sent, and no token of a stop string.
            if not is_sent and (reason is None or start >= self._sent):
                break
            logprobs.append(waiting)
            self._waiting.popleft()
        calls = () if token is None else tuple(token.tool_calls)
        return Piece(text, tuple(logprobs), calls, reason, self._count, self._prompt_tokens)


async def pieces(
    tokens: AsyncIterator[Any],
    request: GenerationRequest,
    *,
    token_timeout_s: float | None,
    prompt_tokens: int = 0,
) -> AsyncIterator[Piece]:
    """Yield the pieces of an answer; the last one has a finish reason.

    The engine's generator is closed at the end, whatever the reason.

    Raises
    ------
    RequestTimeoutError
        The engine has made no token for ``token_timeout_s``.
    TypeError
        The engine yielded something else than tokens.
    """
    assembly = _Assembly(request, prompt_tokens)
    if request.max_tokens == 0:
        yield assembly.nothing()
        return
    async with aclosing(_closable(tokens)) as stream:
        while True:
            token = await _next(stream, token_timeout_s)
            if token is None:
                yield assembly.end()
                return
            piece = assembly.add(token)
            if piece.text or piece.logprobs or piece.tool_calls or piece.finish_reason:
                yield piece
            if piece.finish_reason:
                return


async def _next(stream: AsyncIterator[Any], token_timeout_s: float | None) -> Token | None:
    limit = asyncio.timeout(token_timeout_s)
    try:
        async with limit:
            value = await anext(stream)
    except StopAsyncIteration:
        return None
    except TimeoutError:
        if not limit.expired():  # one of the engine's own
            raise
        raise RequestTimeoutError(f"The model has made no token for {token_timeout_s} s.") from None
    if isinstance(value, str):
        return Token(value)
    if not isinstance(value, Token):
        raise TypeError(f"An engine yields str or Token, got {type(value).__name__}: {value!r:.200}")
    return value


class _Closable:
    """An async iterator that can be closed, whether or not it is a generator."""

    def __init__(self, source: AsyncIterator[Any]) -> None:
        self._source = source

    def __aiter__(self) -> _Closable:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._source)

    async def aclose(self) -> None:
        close = getattr(self._source, "aclose", None)
        if close is not None:
            await close()


def _closable(source: Any) -> Any:
    if hasattr(source, "aclose"):
        return source
    if not hasattr(source, "__aiter__"):
        raise TypeError(
            f"The generate method of an engine must be an async generator; it returned {source!r:.200}"
        )
    return _Closable(aiter(source))
