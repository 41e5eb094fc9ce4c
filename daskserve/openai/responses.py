"""``POST /v1/responses``, for text and function calls. Nothing is stored between requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from daskserve.openai.completions import FullResponse, event, json_text
from daskserve.openai.engine import GenerationRequest, ToolCall
from daskserve.openai.errors import InvalidRequestError
from daskserve.openai.generation import Piece
from daskserve.openai.objects import Usage, chat_logprobs
from daskserve.openai.requests import MAX_MESSAGES, Body, Count, Fields, Items, Tools


class TextOptions(BaseModel):
    """The form of the text."""

    model_config = ConfigDict(extra="allow", strict=True)

    format: dict[str, Any] | None = None


class ResponseBody(Body):
    """``POST /v1/responses``."""

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Items[str] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    metadata: Fields[str] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer contains probabilities."""
        return "message.output_text.logprobs" in (self.include or ())

    def generations(self) -> list[GenerationRequest]:
        """Return the request to the engine."""
        for name in ("previous_response_id", "conversation", "background"):
            if getattr(self, name):
                text = (
                    f"'{name}' is not supported: nothing is stored. Send the whole conversation as 'input'."
                )
                raise InvalidRequestError(text, param=name, code="unsupported_parameter")
        return [
            GenerationRequest(
                messages=self._messages(),
                max_tokens=self.max_output_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                logprobs=(self.top_logprobs or 0) if self.has_logprobs else None,
                tools=[_chat_tool(index, each) for index, each in enumerate(self.tools or ())] or None,
                tool_choice=_chat_choice(self.tool_choice),
                response_format=_chat_format(self.text),
                user=self.user,
                extra=self.extra,
            )
        ]

    def _messages(self) -> list[dict[str, Any]]:
        """Return the conversation in the form of chat completions."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            kind = item.get("type", "message")
            if kind == "message":
                said, last = _message(index, item), messages[-1] if messages else {}
                if said["role"] == last.get("role") == "assistant" and last["content"] is None:
                    last["content"] = said["content"]  # the text follows its calls
                else:
                    messages.append(said)
            elif kind == "function_call":
                call = {"name": item.get("name"), "arguments": item.get("arguments")}
                # All calls that the model made at once, and the text with them, form one message.
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(
                    {"id": item.get("call_id"), "type": "function", "function": call}
                )
            elif kind == "function_call_output":
                content, call_id = item.get("output"), item.get("call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            elif kind != "reasoning":  # left out, because another model cannot use it
                text = f"Items of the type {kind!r} are not supported."
                raise InvalidRequestError(text, param=f"input[{index}].type", code="unsupported_value")
        if not messages:
            raise InvalidRequestError("'input' must not be empty.", param="input")
        return messages


def _message(index: int, item: dict[str, Any]) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise InvalidRequestError(f"Invalid role: {role!r}.", param=f"input[{index}].role")
    if isinstance(content, list):
        texts = ("input_text", "output_text", "text", "refusal")
        content = [
            {"type": "text", "text": each.get("text", each.get("refusal", ""))}
            if isinstance(each, dict) and each.get("type") in texts
            else each
            for each in content
        ]
    elif not isinstance(content, str):
        raise InvalidRequestError("Content must be text or a list.", param=f"input[{index}].content")
    return {"role": role, "content": content}


def _chat_tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        text = f"Tools of the type {tool.get('type')!r} are not supported, only functions."
        raise InvalidRequestError(text, param=f"tools[{index}].type", code="unsupported_value")
    return {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}


def _chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _chat_format(text: TextOptions | None) -> dict[str, Any] | None:
    given = None if text is None else text.format
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: given[key] for key in given if key != "type"}}


class ResponseFormat:
    """Answers of ``/v1/responses``.

    Parameters
    ----------
    head : dict
        The id, the time and the model.
    """

    def __init__(self, body: ResponseBody, head: dict[str, Any]) -> None:
        self._body = body
        self._head = head
        self._id = head["id"].removeprefix("resp_")
        self._whole = FullResponse()
        self._number = 0
        # Positions in the output: of the message, and of the calls by index.
        self._message_at: int | None = None
        self._calls_at: dict[int, int] = {}
        self._is_open = False

    # ---- whole answers

    def whole(self, wholes: Sequence[FullResponse]) -> str:
        self._whole = wholes[0]
        if self._whole.last.finish_reason != "tool_calls" or "".join(self._whole.text):
            self._message_at = 0
        for each in sorted(self._whole.calls):
            self._calls_at[each] = self._count()
        return json_text(self._response(self._status()))

    def _count(self) -> int:
        return len(self._calls_at) + (self._message_at is not None)

    def _status(self) -> str:
        is_cut = self._whole.last.finish_reason in ("length", "content_filter")
        return "incomplete" if is_cut else "completed"

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        body, last, usage = self._body, self._whole.last, None
        if status in ("completed", "incomplete"):
            counts = Usage.of([last])
            usage = {
                "input_tokens": counts.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counts.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts.total_tokens,
            }
        reason = "max_output_tokens" if last.finish_reason == "length" else last.finish_reason
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": error,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._head["model"],
            "output": [] if status == "in_progress" else self._output(status),
            "parallel_tool_calls": bool(body.extra.get("parallel_tool_calls", True)),
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
        }

    def _output(self, status: str) -> list[dict[str, Any]]:
        items: dict[int, dict[str, Any]] = {}
        state = "completed" if status == "completed" else "incomplete"
        if self._message_at is not None:
            items[self._message_at] = self._message(state, [self._part()])
        for index, place in self._calls_at.items():
            items[place] = self._call(self._whole.calls[index], state)
        return [items[each] for each in sorted(items)]

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self) -> dict[str, Any]:
        logprobs = chat_logprobs(self._whole.logprobs)
        return {
            "type": "output_text",
            "text": "".join(self._whole.text),
            "annotations": [],
            "logprobs": logprobs,
        }

    def _call(self, call: ToolCall, status: str) -> dict[str, Any]:
        return {
            "id": f"fc_{self._id}_{call.index}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments if status != "in_progress" else "",
            "status": status,
        }

    # ---- streams

    def chunks(self, index: int, piece: Piece) -> Iterator[str]:
        if not self._is_open:
            yield from self._open()
        if piece.text or piece.logprobs:
            if self._message_at is None:
                yield from self._begin_message()
            yield self._event(
                "response.output_text.delta",
                **self._place(),
                delta=piece.text,
                logprobs=chat_logprobs(piece.logprobs),
            )
        self._whole.add(piece)
        for call in piece.tool_calls:
            yield from self._call_chunks(call)

    def _open(self) -> Iterator[str]:
        self._is_open = True
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def _begin_message(self) -> Iterator[str]:
        self._message_at = self._count()
        item = self._message("in_progress", [])
        yield self._event("response.output_item.added", output_index=self._message_at, item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._id}", "output_index": self._message_at, "content_index": 0}

    def _call_chunks(self, part: ToolCall) -> Iterator[str]:
        call = self._whole.calls[part.index]
        if part.index not in self._calls_at:
            self._calls_at[part.index] = self._count()
            item, place = self._call(call, "in_progress"), self._calls_at[part.index]
            yield self._event("response.output_item.added", output_index=place, item=item)
        if part.arguments:
            yield self._event(
                "response.function_call_arguments.delta", **self._call_place(part), delta=part.arguments
            )

    def _call_place(self, call: ToolCall) -> dict[str, Any]:
        return {"item_id": f"fc_{self._id}_{call.index}", "output_index": self._calls_at[call.index]}

    def end(self) -> Iterator[str]:
        if not self._is_open:
            yield from self._open()
        status = self._status()
        if self._message_at is None and not self._calls_at:
            yield from self._begin_message()
        if self._message_at is not None:
            part = self._part()
            yield self._event(
                "response.output_text.done", **self._place(), text=part["text"], logprobs=part["logprobs"]
            )
            yield self._event("response.content_part.done", **self._place(), part=part)
        for index in self._calls_at:
            call = self._whole.calls[index]
            yield self._event(
                "response.function_call_arguments.done",
                **self._call_place(call),
                name=call.name,
                arguments=call.arguments,
            )
        for place, item in enumerate(self._output(status)):
            yield self._event("response.output_item.done", output_index=place, item=item)
        yield self._event(f"response.{status}", response=self._response(status))

    def failure(self, error: dict[str, Any]) -> Iterator[str]:
        known = error["error"]
        fault = {"code": known["code"] or known["type"], "message": known["message"]}
        yield self._event("error", **fault, param=known["param"])
        yield self._event("response.failed", response=self._response("failed", fault))

    def _event(self, name: str, /, **fields: Any) -> str:
        body = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return event(body, name)
