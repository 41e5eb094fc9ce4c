"""Answers of ``/v1/chat/completions`` and ``/v1/completions``: whole ones, and streams of chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar, Protocol

from daskserve.openai.engine import Token, ToolCall
from daskserve.openai.generation import Piece
from daskserve.openai.objects import (
    ChatChoice,
    ChatMessage,
    Choice,
    Completion,
    CompletionChoice,
    CompletionKind,
    Function,
    ToolCallPart,
    Usage,
    chat_logprobs,
    completion_logprobs,
)
from daskserve.openai.requests import ChatBody, CompletionBody, Sampling

#: The pieces of several answers, each with the number of its answer.
Numbered = AsyncIterator[tuple[int, Piece | str]]
#: The JSON text of a string with one NUL character, which marks the place of a chunk's text.
FILLER = '"\\u0000"'
#: The end of a stream.
DONE = "data: [DONE]\n\n"


class FullResponse:
    """A whole answer, joined from its pieces."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.logprobs: list[Token] = []
        self.calls: dict[int, ToolCall] = {}
        self.last = Piece()

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.logprobs += piece.logprobs
        for each in piece.tool_calls:
            known = self.calls.setdefault(each.index, ToolCall(each.index))
            known.id = known.id or each.id
            known.name = known.name or each.name
            known.arguments += each.arguments
        self.last = piece


async def gathered(numbered: Numbered, count: int) -> list[FullResponse]:
    """Return the whole answers."""
    wholes = [FullResponse() for _ in range(count)]
    async for index, item in numbered:
        wholes[index].add(as_piece(item))
    return wholes


def as_piece(item: Piece | str) -> Piece:
    """Return an item of a stream as a piece; pieces that contain only text are sent as `str`."""
    return Piece(item) if isinstance(item, str) else item


class Format(Protocol):
    """Formats the answers of one path."""

    def whole(self, wholes: Sequence[FullResponse]) -> str: ...

    def chunks(self, index: int, piece: Piece) -> Iterator[str]: ...

    def end(self) -> Iterator[str]: ...

    def failure(self, error: dict[str, Any]) -> Iterator[str]: ...


class _Choices:
    """The common part of chat and plain completions.

    Parameters
    ----------
    head : dict
        The id, the time and the model.
    """

    #: The values of the field ``object`` of whole answers and of chunks.
    KIND: ClassVar[CompletionKind]
    CHUNK_KIND: ClassVar[CompletionKind]

    def __init__(self, body: Sampling, head: dict[str, Any], *, has_logprobs: bool) -> None:
        self._head = head
        self._has_usage = body.has_usage
        self._has_logprobs = has_logprobs
        self._per_prompt = body.n or 1
        self._last: dict[int, Piece] = {}

    def whole(self, wholes: Sequence[FullResponse]) -> str:
        choices = [self._choice(index, each) for index, each in enumerate(wholes)]
        usage = Usage.of([each.last for each in wholes], self._per_prompt)
        return Completion(object=self.KIND, choices=choices, usage=usage, **self._head).as_text()

    def _choice(self, index: int, whole: FullResponse) -> Choice:
        raise NotImplementedError

    def end(self) -> Iterator[str]:
        if self._has_usage:
            last = [self._last[each] for each in sorted(self._last)]
            yield self._event([], Usage.of(last, self._per_prompt))
        yield DONE

    def failure(self, error: dict[str, Any]) -> Iterator[str]:
        """Yield the event of an error in the middle of a stream."""
        yield event(error)
        yield DONE

    def _event(self, choices: list[Choice], usage: Usage | None = None) -> str:
        made = Completion(object=self.CHUNK_KIND, choices=choices, **self._head)
        if self._has_usage:
            made.usage = usage
        return f"data: {made.as_text()}\n\n"


class ChatFormat(_Choices):
    """Answers of ``/v1/chat/completions``."""

    KIND = "chat.completion"
    CHUNK_KIND = "chat.completion.chunk"

    def __init__(self, body: ChatBody, head: dict[str, Any]) -> None:
        super().__init__(body, head, has_logprobs=bool(body.logprobs))
        # The JSON before and after the text of a chunk without other fields, by the number of the answer.
        self._frames: dict[int, tuple[str, str]] = {}

    def _choice(self, index: int, whole: FullResponse) -> ChatChoice:
        text = "".join(whole.text)
        message = ChatMessage(role="assistant", content=text, refusal=None)
        if whole.calls:
            message.content = text or None
            message.tool_calls = [
                ToolCallPart(
                    id=each.id,
                    type="function",
                    function=Function(name=each.name, arguments=each.arguments),
                )
                for _, each in sorted(whole.calls.items())
            ]
        logprobs = {"content": chat_logprobs(whole.logprobs)} if self._has_logprobs else None
        reason = whole.last.finish_reason
        return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=reason)

    def chunks(self, index: int, piece: Piece) -> Iterator[str]:
        if index not in self._last:
            yield self._chunk(index, ChatMessage(role="assistant", content=""), None, ())
            # Split from the right, because the client chooses the model's name, which comes first.
            before, after = self._chunk(index, ChatMessage(content="\0"), None, ()).rsplit(FILLER, 1)
            self._frames[index] = (before, after)
        self._last[index] = piece
        if piece.text and not piece.logprobs:
            before, after = self._frames[index]
            yield f"{before}{json.dumps(piece.text)}{after}"
        elif piece.logprobs:
            yield self._chunk(index, ChatMessage(content=piece.text), None, piece.logprobs)
        for call in piece.tool_calls:
            yield self._chunk(index, ChatMessage(tool_calls=[_part(call)]), None, ())
        if piece.finish_reason:
            yield self._chunk(index, ChatMessage(), piece.finish_reason, ())

    def _chunk(self, index: int, delta: ChatMessage, reason: str | None, logprobs: Sequence[Token]) -> str:
        choice = ChatChoice(index=index, delta=delta, finish_reason=reason)
        if self._has_logprobs:
            choice.logprobs = {"content": chat_logprobs(logprobs)} if logprobs else None
        return self._event([choice])


def _part(call: ToolCall) -> ToolCallPart:
    if not (call.id or call.name):
        return ToolCallPart(index=call.index, function=Function(arguments=call.arguments))
    function = Function(name=call.name, arguments=call.arguments)
    return ToolCallPart(index=call.index, id=call.id, type="function", function=function)


class CompletionFormat(_Choices):
    """Answers of ``/v1/completions``."""

    KIND = CHUNK_KIND = "text_completion"

    def __init__(self, body: CompletionBody, head: dict[str, Any]) -> None:
        super().__init__(body, head, has_logprobs=body.logprobs is not None)
        prompts = body.prompts() if body.echo else []
        self._echoed = [str(each) for each in prompts for _ in range(body.n or 1)]
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, whole: FullResponse) -> CompletionChoice:
        echo = self._echo(index)
        logprobs = completion_logprobs(whole.logprobs, len(echo)) if self._has_logprobs else None
        text, reason = echo + "".join(whole.text), whole.last.finish_reason
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)

    def _echo(self, index: int) -> str:
        return self._echoed[index] if self._echoed else ""

    def chunks(self, index: int, piece: Piece) -> Iterator[str]:
        echo = "" if index in self._last else self._echo(index)
        self._last[index] = piece
        offset = self._offsets.get(index, 0) + len(echo)
        self._offsets[index] = offset + sum(len(each.text) for each in piece.logprobs)
        choice = CompletionChoice(index=index, text=echo + piece.text, finish_reason=piece.finish_reason)
        choice.logprobs = completion_logprobs(piece.logprobs, offset) if self._has_logprobs else None
        yield self._event([choice])


def event(body: dict[str, Any], name: str = "") -> str:
    """Return a server-sent event."""
    text = json_text(body)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def json_text(body: Any) -> str:
    """Return the JSON text of a body."""
    return json.dumps(body, separators=(",", ":"))
