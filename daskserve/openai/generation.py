"""Turns the tokens of an engine into the pieces of an answer: applies stop strings, limits and timeouts."""

from __future__ import annotations

import asyncio
import math
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
    """A part of an answer. The last one has a ``finish_reason`` and the token counts.

    A piece that contains only text is sent as `str` instead, at a tenth of the cost.
    """

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
        self._is_plain = not request.stop and request.logprobs is None
        self._limit = math.inf if request.max_tokens is None else request.max_tokens
        self._count = 0
        self._prompt_tokens = prompt_tokens
        self._has_tool_calls = False
        # Tokens with probabilities whose text is held back, and the position at which the text begins.
        self._waiting: deque[tuple[int, Token]] = deque()
        self._seen = 0
        self._sent = 0

    def add(self, value: Any) -> Piece | str:
        """Return the piece for an output of the engine; empty if its text is held back."""
        if self._is_plain and type(value) is str and self._count + 1 < self._limit:
            self._count += 1
            return value
        token = _token(value)
        self._count += token.count
        if token.prompt_tokens is not None:
            self._prompt_tokens = token.prompt_tokens
        self._has_tool_calls |= bool(token.tool_calls)
        if self._request.logprobs is not None and token.logprob is not None:
            self._waiting.append((self._seen, token))
        self._seen += len(token.text)
        text = self._scanner.feed(token.text)
        if self._scanner.found:
            return self._piece(text, "stop", token)
        if token.finish_reason is not None or self._count >= self._limit:
            return self._piece(text + self._scanner.end(), token.finish_reason or "length", token)
        return self._piece(text, None, token)

    def end(self) -> Piece:
        """Return the last piece, after the engine has ended the answer."""
        return self._piece(self._scanner.end(), "tool_calls" if self._has_tool_calls else "stop", None)

    def nothing(self) -> Piece:
        """Return the whole answer to a request for zero tokens."""
        return self._piece("", "length", None)

    def _piece(self, text: str, reason: str | None, token: Token | None) -> Piece:
        self._sent += len(text)
        logprobs = []
        while self._waiting:
            start, waiting = self._waiting[0]
            is_sent = start + len(waiting.text) <= self._sent
            # The last piece also has tokens whose text was sent in part, but no tokens of a stop string.
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
) -> AsyncIterator[Piece | str]:
    """Yield the pieces of an answer; the last one is a `Piece` with a finish reason.

    The engine's generator is closed at the end, for any reason.

    Raises
    ------
    RequestTimeoutError
        The engine has made no token for ``token_timeout_s``.
    TypeError
        The engine yielded something other than tokens.
    """
    assembly = _Assembly(request, prompt_tokens)
    if request.max_tokens == 0:
        yield assembly.nothing()
        return
    async with aclosing(_closable(tokens)) as stream:
        with _Watch(token_timeout_s) as watch:
            while True:
                watch.began = watch.loop.time()
                try:
                    value = await anext(stream)
                except StopAsyncIteration:
                    yield assembly.end()
                    return
                except asyncio.CancelledError:
                    watch.check()
                    raise
                watch.began = math.inf
                piece = assembly.add(value)
                if type(piece) is str:
                    if piece:
                        yield piece
                    continue
                assert isinstance(piece, Piece)
                if piece.text or piece.logprobs or piece.tool_calls or piece.finish_reason:
                    yield piece
                if piece.finish_reason:
                    return


class _Watch:
    """Cancels the current task if it waits too long for a token; uses one timer for all waits.

    Attributes
    ----------
    began : float
        When the current wait began; infinity between waits.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.began = math.inf
        self._timeout_s = timeout_s
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._has_expired = False

    def __enter__(self) -> _Watch:
        if self._timeout_s is not None:
            self._timer = self.loop.call_later(self._timeout_s, self._check)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        assert self._timeout_s is not None
        now = self.loop.time()
        ends = min(self.began, now) + self._timeout_s
        if ends > now:
            self._timer = self.loop.call_at(ends, self._check)
        elif self._task is not None:
            self._has_expired = True
            self._task.cancel()

    def check(self) -> None:
        """Raise `RequestTimeoutError` if this watch has cancelled the task."""
        if self._has_expired and self._task is not None and self._task.uncancel() == 0:
            raise RequestTimeoutError(f"The model has produced no token for {self._timeout_s} s.") from None


def _token(value: Any) -> Token:
    if isinstance(value, str):
        return Token(value)
    if not isinstance(value, Token):
        raise TypeError(f"An engine yields str or Token, got {type(value).__name__}: {value!r:.200}")
    if not isinstance(value.text, str) or not isinstance(value.finish_reason, str | None):
        raise TypeError(f"The text and the finish_reason of a Token must be strings, got {value!r:.200}")
    for each in value.tool_calls:
        if not isinstance(each, ToolCall):
            raise TypeError(
                f"tool_calls holds {each!r:.200}; give daskserve.openai.ToolCall(index, id, name, arguments)"
            )
        texts = each.id, each.name, each.arguments
        if not all(isinstance(text, str) for text in texts) or not isinstance(each.index, int):
            raise TypeError(f"A ToolCall needs an index, and strings in all other fields, got {each!r:.200}")
    return value


async def _items_of(source: Any) -> AsyncIterator[Any]:
    async for item in source:
        yield item


def _closable(source: Any) -> Any:
    """Return the tokens of an engine as an async iterator with ``aclose``."""
    if hasattr(source, "aclose"):
        return source
    if not hasattr(source, "__aiter__"):
        raise TypeError(
            f"The generate method of an engine must be an async generator; it returned {source!r:.200}"
        )
    return _items_of(source)
