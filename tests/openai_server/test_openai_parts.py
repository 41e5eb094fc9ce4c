"""The parts of the OpenAI-compatible server that need no instance."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tables import each_case

from daskserve.errors import BadRequestError, RequestTimeoutError
from daskserve.openai import GenerationRequest, Token, ToolCall, build_app, text_of
from daskserve.openai.completions import as_piece
from daskserve.openai.errors import InvalidRequestError, invalid_request
from daskserve.openai.generation import Piece, pieces
from daskserve.openai.merging import called, merged
from daskserve.openai.requests import ChatBody, CompletionBody, EmbeddingBody
from daskserve.openai.responses import ResponseBody
from daskserve.openai.stopping import StopScanner
from daskserve.testing import run_virtual

LETTERS = st.text("ab ", max_size=12)


@given(st.lists(LETTERS), st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_are_found_wherever_the_text_is_cut(parts: list[str], stops: list[str]) -> None:
    scanner, sent, text = StopScanner(stops), "", ""
    for part in parts:
        text += part
        sent += scanner.feed(part)
        if scanner.found:
            break
        # Nothing is held back but what may be the beginning of a stop string.
        assert sent + scanner.held == text
        assert not scanner.held or any(each.startswith(scanner.held) for each in stops)
    else:
        sent += scanner.end()
    whole = "".join(parts)
    places = [place for each in stops if (place := whole.find(each)) >= 0]
    assert scanner.found == bool(places)
    assert sent == (whole[: min(places)] if places else whole)


async def tokens_of(*tokens: Any, delay_s: float = 0.0) -> AsyncIterator[Any]:
    for each in tokens:
        await asyncio.sleep(delay_s)
        if isinstance(each, Exception):
            raise each
        yield each


def answer(*tokens: Any, delay_s: float = 0.0, **request: Any) -> list[Piece]:
    async def read() -> list[Piece]:
        source = tokens_of(*tokens, delay_s=delay_s)
        made = pieces(source, GenerationRequest(**request), token_timeout_s=10)
        return [as_piece(each) async for each in made]

    return run_virtual(read)


@each_case(
    ("tokens", "request_", "text", "reason", "count"),
    [
        (["a", "b"], {}, "ab", "stop", 2),
        (["a", "b", "c"], {"max_tokens": 2}, "ab", "length", 2),
        (["a", "b"], {"max_tokens": 0}, "", "length", 0),
        (["one t", "wo ", "three"], {"stop": ("two",)}, "one ", "stop", 2),
        (["one t", "w"], {"stop": ("two",)}, "one tw", "stop", 2),
        (["one t", "w"], {"stop": ("two",), "max_tokens": 1}, "one t", "length", 1),
        ([Token("a", count=3), "b"], {"max_tokens": 3}, "a", "length", 3),
        ([Token("a", finish_reason="content_filter"), "b"], {}, "a", "content_filter", 1),
        ([Token(tool_calls=[ToolCall(0, "1", "f", "{}")])], {}, "", "tool_calls", 1),
        ([], {}, "", "stop", 0),
    ],
)
def test_an_answer_ends_with_a_reason(
    tokens: list[Any], request_: dict[str, Any], text: str, reason: str, count: int
) -> None:
    found = answer(*tokens, **request_)
    assert "".join(each.text for each in found) == text
    assert [each.finish_reason for each in found if each.finish_reason] == [reason]
    assert found[-1].completion_tokens == count


def test_probabilities_come_with_the_text_they_belong_to() -> None:
    tokens = [Token(each, logprob=-1.0) for each in ("x", "a", "b", "c")]
    found = answer(*tokens, stop=("abd", "c"), logprobs=0)
    assert [(each.text, [one.text for one in each.logprobs]) for each in found] == [
        ("x", ["x"]),
        ("ab", ["a", "b"]),
    ]
    assert answer(*tokens)[0].logprobs == ()  # nobody has asked


def test_an_engine_that_makes_no_token_in_time_is_ended() -> None:
    with pytest.raises(RequestTimeoutError, match="no token for 10 s"):
        answer("a", delay_s=11)
    with pytest.raises(TimeoutError, match="of the engine"):
        answer(TimeoutError("of the engine"))
    calls = [ToolCall(0, "c", "f", {"a": 1}), {"index": 0}]  # type: ignore[arg-type]
    wrong_calls = [Token(tool_calls=[each]) for each in calls]  # type: ignore[list-item]
    for wrong in (3, Token(None), Token("a", finish_reason=3), *wrong_calls):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"str or Token|texts"):
            answer(wrong)


def test_merged_streams_end_together() -> None:
    closed = []

    async def stream(name: str, count: float) -> AsyncIterator[str]:
        try:
            while count > 0:
                await asyncio.sleep(1)
                count -= 1
                yield name
            if count < 0:
                raise ValueError(name)
        finally:
            closed.append(name)

    async def read(*counts: float) -> list[tuple[int, str]]:
        return [each async for each in merged([stream(str(n), c) for n, c in enumerate(counts)])]

    assert sorted(run_virtual(read, 1, 2)) == [(0, "0"), (1, "1"), (1, "1")]
    closed.clear()
    with pytest.raises(ValueError, match="1"):
        run_virtual(read, 100, 0.5, 100)
    assert sorted(closed) == ["0", "1", "2"]


def test_calls_let_others_run_and_the_last_ones_fault_closes_the_first() -> None:
    seen: list[str] = []

    class Stream:
        async def aclose(self) -> None:
            seen.append("closed")

    def call(number: int) -> Stream:
        seen.append("called")
        asyncio.get_running_loop().call_soon(seen.append, "other")
        if number == 2:
            raise ValueError("no more")
        return Stream()

    with pytest.raises(ValueError, match="no more"):
        run_virtual(called, call, range(3))
    assert seen[:7] == ["called", "other", "called", "other", "called", "closed", "closed"]


LONG = "x" * 200_000
CHAT = '"model": "m", "messages": [{"role": "user", "content": "x"}]'


@each_case(
    ("kind", "body", "param"),
    [
        (ChatBody, "{", None),
        (ChatBody, "[" * 100_000, None),
        (ChatBody, "[]", None),
        (ChatBody, '{"model": "m"}', "messages"),
        (ChatBody, '{"model": "m", "messages": []}', "messages"),
        (ChatBody, '{"model": "m", "messages": [{"role": "king"}]}', "messages[0].role"),
        (ChatBody, '{"model": "m", "messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        (ChatBody, f'{{{CHAT}, "temperature": "hot"}}', "temperature"),
        (ChatBody, f'{{{CHAT}, "max_tokens": 1.5}}', "max_tokens"),
        (ChatBody, f'{{{CHAT}, "stream": "yes"}}', "stream"),
        (ChatBody, f'{{{CHAT}, "max_tokens": {10**4000}}}', "max_tokens"),
        (ChatBody, f'{{{CHAT}, "logit_bias": {{"1": NaN}}}}', "logit_bias"),
        (ChatBody, f'{{{CHAT}, "own": [Infinity]}}', None),
        (CompletionBody, '{"model": "m", "prompt": [-1]}', "prompt[0]"),
        (ChatBody, f'{{{CHAT}, "n": 10000}}', "n"),
        (ChatBody, f'{{{CHAT}, "seed": {2**63}}}', "seed"),
        (ChatBody, f'{{{CHAT}, "stop": {["a"] * 1000}}}'.replace("'", '"'), "stop"),
        (ChatBody, f'{{{CHAT}, "stop": ""}}', "stop"),
        (ChatBody, f'{{{CHAT}, "top_logprobs": 2}}', "top_logprobs"),
        (ChatBody, f'{{{CHAT}, "n": 128, "user": "{LONG}"}}', "n"),
        (CompletionBody, f'{{"model": "m", "prompt": [[1]{", [1]" * 127}], "user": "{LONG}"}}', "prompt"),
        (CompletionBody, '{"model": "m", "prompt": {}}', "prompt"),
        (CompletionBody, '{"model": "m", "prompt": []}', "prompt"),
        (CompletionBody, '{"model": "m", "prompt": ["a", "b"], "n": 100}', "n"),
        (CompletionBody, '{"model": "m", "prompt": "a", "best_of": 2}', "best_of"),
        (EmbeddingBody, '{"model": "m", "input": []}', "input"),
        (EmbeddingBody, '{"model": "m", "input": "a", "dimensions": 1000000000}', "dimensions"),
        (EmbeddingBody, '{"model": "m", "input": ["a", ""]}', "input"),
        (ResponseBody, '{"model": "m", "input": "x", "previous_response_id": "y"}', "previous_response_id"),
        (ResponseBody, '{"model": "m", "input": [{"type": "computer_call"}]}', "input[0].type"),
        (ResponseBody, '{"model": "m", "input": [{"role": "king", "content": ""}]}', "input[0].role"),
        (ResponseBody, '{"model": "m", "input": "x", "tools": [{"type": "web"}]}', "tools[0].type"),
    ],
)
def test_a_wrong_body_names_its_field(kind: Any, body: str, param: str | None) -> None:
    def ask() -> None:
        parsed = kind.parse(body.encode())
        parsed.request() if kind is EmbeddingBody else parsed.generations()

    with pytest.raises(InvalidRequestError) as caught:
        ask()
    assert caught.value.param == param


@each_case(
    ("kind", "fields", "item"),
    [
        (CompletionBody, '"prompt": MANY', "{}"),
        (CompletionBody, '"prompt": MANY', "[{}]"),
        (CompletionBody, '"prompt": [MANY]', "{}"),
        (EmbeddingBody, '"input": MANY', "{}"),
        (EmbeddingBody, '"input": MANY', '""'),
        (ChatBody, '"messages": MANY', "0"),
        (ChatBody, '"messages": MANY', '{"role": "user"}'),
        (ChatBody, '"messages": [{"role": "user", "content": MANY}]', "0"),
        (ChatBody, '"messages": [], "tools": MANY', "0"),
        (ChatBody, '"messages": [], "stop": MANY', "0"),
        (ChatBody, '"messages": [], "logit_bias": NAMED', "[]"),
        (ResponseBody, '"input": MANY', "0"),
        (ResponseBody, '"input": MANY', "{}"),
        (ResponseBody, '"input": "x", "include": MANY', "0"),
        (ResponseBody, '"input": "x", "tools": MANY', "{}"),
        (ResponseBody, '"input": "x", "metadata": NAMED', "[]"),
    ],
)
def test_a_body_of_many_faults_has_few_errors(
    kind: Any, fields: str, item: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def note(error: ValidationError) -> InvalidRequestError:
        counts.append(error.error_count())
        return invalid_request(error)

    monkeypatch.setattr("daskserve.openai.requests.invalid_request", note)
    many = f"[{','.join([item] * 10_001)}]"
    named = ",".join(f'"{each}": {item}' for each in range(10_001))
    text = fields.replace("MANY", many).replace("NAMED", f"{{{named}}}")
    with pytest.raises(InvalidRequestError):
        kind.parse(f'{{"model": "m", {text}}}'.encode())
    assert counts[0] < 10


def test_null_and_unknown_fields_are_fine() -> None:
    body = ChatBody.parse(f'{{{CHAT}, "n": null, "stop": null, "seed": 5, "shape": [1]}}'.encode())
    (request,) = body.generations()
    assert (request.seed, request.extra, request.stop) == (5, {"shape": [1]}, ())


def test_each_answer_has_a_seed_that_generators_take() -> None:
    body = ChatBody.parse(f'{{{CHAT}, "n": 3, "seed": {2**63 - 2}}}'.encode())
    assert [each.seed for each in body.generations()] == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_a_response_becomes_a_conversation() -> None:
    items = """[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"}]"""
    options = """ "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}} """
    text = f'{{"model": "m", "instructions": "be brief", "input": {items}, {options}}}'
    (request,) = ResponseBody.parse(text.encode()).generations()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert request.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    assert request.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert request.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert request.response_format == {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}


def test_the_text_of_a_message_is_that_of_its_parts_which_have_one() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    content = [{"type": "text", "text": "a"}, image, {"type": "text", "text": None}, {"text": "b"}]
    assert text_of({"role": "user", "content": content}) == "ab"
    assert text_of({"role": "assistant", "content": None}) == ""


def test_calls_made_at_once_become_one_message() -> None:
    calls = [{"type": "function_call", "call_id": each, "name": "f", "arguments": "{}"} for each in "abc"]
    outputs = [{"type": "function_call_output", "call_id": each, "output": each} for each in "abc"]
    said = {"role": "assistant", "content": "wait"}
    items = [said, {"type": "reasoning"}, *calls[:2], *outputs[:2], calls[2], said, outputs[2]]
    (request,) = ResponseBody.parse(json.dumps({"model": "m", "input": items}).encode()).generations()
    assert request.messages is not None
    shape = [(m["role"], m["content"], [c["id"] for c in m.get("tool_calls", ())]) for m in request.messages]
    assert shape == [
        ("assistant", "wait", ["a", "b"]),
        ("tool", "a", []),
        ("tool", "b", []),
        ("assistant", "wait", ["c"]),
        ("tool", "c", []),
    ]


def test_each_model_has_a_deployment_with_its_name() -> None:
    app = build_app({"a/b": "m:A", "a-b": {"engine": "m:B", "deployment": {"num_replicas": 2}}})
    models = app.args[0]
    assert {name: each.deployment.name for name, each in models.items()} == {"a/b": "a-b", "a-b": "a-b-2"}
    assert models["a-b"].deployment.num_replicas == 2


@each_case("models", [{}, [], {"": "m:A"}, {"a": {"engin": "m:A"}}])
def test_wrong_models_are_refused(models: Any) -> None:
    with pytest.raises(ValueError):
        build_app(models)
    assert issubclass(BadRequestError, ValueError)
