"""The parts of the OpenAI-compatible server that need no instance."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tables import each_case

from daskserve.errors import (
    ActorLostError,
    BackPressureError,
    BadRequestError,
    ModelCapacityError,
    QuarantinedError,
    RequestTimeoutError,
    ServeError,
    UnavailableError,
)
from daskserve.openai import GenerationRequest, Token, ToolCall, build_app, text_of
from daskserve.openai.completions import as_piece
from daskserve.openai.engine import EmbeddingRequest, Embeddings
from daskserve.openai.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    error_answer,
    invalid_request,
)
from daskserve.openai.generation import Piece, pieces
from daskserve.openai.merging import called, merged
from daskserve.openai.model import LONG_PROMPT, MAX_FLOAT32, ModelServer
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
        # Only text that may be the beginning of a stop string is held back.
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
    wrong_call = Token(tool_calls=[ToolCall(0, "c", "f", {"a": 1})])  # type: ignore[arg-type]
    for wrong in (3, Token(None), Token("a", finish_reason=3), wrong_call):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"str or Token|strings"):
            answer(wrong)
    with pytest.raises(TypeError, match=r"holds {'index': 0}; give daskserve\.openai\.ToolCall\(index"):
        answer(Token(tool_calls=[{"index": 0}]))  # type: ignore[list-item]


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


@each_case(
    ("error", "status", "kind", "code", "text", "headers"),
    [
        (InvalidRequestError("no", param="n"), 400, "invalid_request_error", None, "no", {}),
        (ModelNotFoundError("no"), 404, "invalid_request_error", "model_not_found", "no", {}),
        (BadRequestError("no"), 400, "invalid_request_error", None, "no", {}),
        (
            BackPressureError("full", retry_after_s=1.2),
            503,
            "overloaded_error",
            "overloaded",
            "The model is overloaded. full",
            {"retry-after": "2"},
        ),
        (
            BackPressureError("full", retry_after_s=0.1),
            503,
            "overloaded_error",
            "overloaded",
            "The model is overloaded. full",
            {"retry-after": "1"},
        ),
        (
            ActorLostError("tcp://10.0.0.1 is gone"),
            502,
            "server_error",
            "unavailable",
            "Request q failed: ",
            {},
        ),
        (
            UnavailableError("the instance ends", is_public=True),
            503,
            "server_error",
            "unavailable",
            "the instance ends",
            {"retry-after": "1"},
        ),
        (QuarantinedError("tcp://10.0.0.1"), 502, "server_error", "unavailable", "Request q failed: ", {}),
        (
            ModelCapacityError("no room"),
            503,
            "server_error",
            "unavailable",
            "Request q ",
            {"retry-after": "1"},
        ),
        (RequestTimeoutError("late"), 408, "timeout_error", "timeout", "late", {}),
        (
            KeyError("secret"),
            500,
            "server_error",
            None,
            "The model has failed; the log has the error under",
            {},
        ),
    ],
)
def test_an_error_is_answered_with_what_a_client_may_know(
    error: Exception, status: int, kind: str, code: str | None, text: str, headers: dict[str, str]
) -> None:
    found, body, more = error_answer(error, "q")
    assert (found, body["error"]["type"], body["error"]["code"], dict(more)) == (status, kind, code, headers)
    assert body["error"]["message"].startswith(text)
    assert "10.0.0.1" not in body["error"]["message"]
    assert "secret" not in body["error"]["message"]


class Counted:
    """An engine with all optional methods and attributes."""

    context_length = 10

    def __init__(self, count: Any = 4, vectors: Any = ((1, 2.5),)) -> None:
        self.count, self.vectors = count, vectors
        self.threads: list[bool] = []
        self.configs: list[Any] = []

    def count_tokens(self, request: GenerationRequest) -> Any:
        self.threads.append(threading.current_thread() is not threading.main_thread())
        return self.count

    async def generate(self, request: GenerationRequest) -> AsyncIterator[str]:
        yield str(request.max_tokens)

    def embed(self, request: EmbeddingRequest) -> Any:
        return self.vectors

    def check_health(self) -> None:
        raise OSError("no device")

    async def reconfigure(self, config: Any) -> None:
        self.configs.append(config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"a": 1.0}


class Neither:
    pass


class EmbedsOnly:
    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        return Embeddings([[1.0]], 3)


class GeneratesOnly:
    def generate(self, request: GenerationRequest) -> Any:
        return [request]


async def text_from(server: ModelServer, **request: Any) -> str:
    made = [piece async for piece in server.generate(GenerationRequest(**request))]
    return "".join(piece if isinstance(piece, str) else piece.text for piece in made)


async def test_the_length_of_a_prompt_limits_the_answer() -> None:
    server = ModelServer(Counted, {}, 10.0)
    assert await text_from(server, prompt="a") == "6", "all that is left"
    assert await text_from(server, prompt="a", max_tokens=6) == "6"
    assert await text_from(server, prompt="a", max_tokens=2) == "2"
    with pytest.raises(ContextLengthError, match=r"You requested 11: 4 in the prompt, 7 in the completion"):
        await text_from(server, prompt="a", max_tokens=7)
    full = ModelServer(Counted, {"count": 10}, 10.0)
    with pytest.raises(
        ContextLengthError, match=r"10 in the messages, 0 in the completion. Shorten the mess"
    ):
        await text_from(full, messages=[{"role": "user", "content": "a"}])
    assert await text_from(ModelServer(Counted, {"count": 9}, 10.0), prompt="a") == "1"
    engine = Counted()
    asked = ModelServer(lambda: engine, {}, 10.0)
    await text_from(asked, prompt="a" * LONG_PROMPT)
    await text_from(asked, prompt="a" * (LONG_PROMPT + 1))
    await text_from(asked, messages=[{"role": "user", "content": "a" * (LONG_PROMPT + 1)}])
    assert engine.threads == [False, True, True], "long ones are counted in a thread"

    async def counting(request: GenerationRequest) -> int:
        return 8

    engine.count_tokens = counting  # type: ignore[method-assign]
    assert await text_from(asked, prompt="a") == "2"


async def test_an_engine_does_what_it_has_methods_for() -> None:
    with pytest.raises(TypeError, match=r"An engine has a method generate\(request\), or embed"):
        ModelServer(Neither, {}, None)
    embeds, generates = ModelServer(EmbedsOnly, {}, 10.0), ModelServer(f"{__name__}:GeneratesOnly", {}, 10.0)
    with pytest.raises(InvalidRequestError, match="The model 'm' does not generate text"):
        await text_from(embeds, model="m", prompt="a")
    assert await embeds.embed(EmbeddingRequest(inputs=["a"])) == Embeddings([[1.0]], 3)
    with pytest.raises(InvalidRequestError, match="The model 'm' does not create embeddings"):
        await generates.embed(EmbeddingRequest(model="m", inputs=["a"]))
    with pytest.raises(TypeError, match="must be an async generator; it returned"):
        await text_from(generates, prompt="a")
    for server in (embeds, generates):
        await server.check_health()
        assert await server.record_autoscaling_stats() == {}
        with pytest.raises(
            ServeError, match=r"has a user_config, but the engine .* has no method reconfigure"
        ):
            await server.reconfigure({})
    engine = Counted()
    server = ModelServer(lambda: engine, {}, 10.0)
    with pytest.raises(OSError, match="no device"):
        await server.check_health()
    await server.reconfigure({"a": 1})
    assert (engine.configs, await server.record_autoscaling_stats()) == ([{"a": 1}], {"a": 1.0})


@each_case(
    ("vectors", "message"),
    [
        ([[1.0], [2.0]], "embed returned 2 vectors for 1 texts"),
        ([], "embed returned 0 vectors for 1 texts"),
        ([[1.0, 2 * MAX_FLOAT32]], "which does not fit in a 4-byte float"),
        ([[float("nan")]], "embed returned nan in a vector"),
        ([[MAX_FLOAT32, -MAX_FLOAT32]], ""),
    ],
)
def test_vectors_that_cannot_be_are_refused(vectors: Any, message: str) -> None:
    making = ModelServer(Counted, {"vectors": vectors}, 10.0).embed(EmbeddingRequest(inputs=["a"]))
    if not message:
        assert asyncio.run(making).vectors == vectors
        return
    with pytest.raises((TypeError, ValueError), match=message):
        asyncio.run(making)


async def test_vectors_that_are_not_made_in_time_are_given_up() -> None:
    class Hangs:
        async def embed(self, request: EmbeddingRequest) -> Any:
            await asyncio.Event().wait()

    class Late:
        async def embed(self, request: EmbeddingRequest) -> Any:
            raise TimeoutError("of its own")

    with pytest.raises(RequestTimeoutError, match=r"has produced no vectors for 0.01 s"):
        await ModelServer(Hangs, {}, 0.01).embed(EmbeddingRequest(inputs=["a"]))
    with pytest.raises(TimeoutError, match="of its own"):
        await ModelServer(Late, {}, 10.0).embed(EmbeddingRequest(inputs=["a"]))


class Iterator:
    """An async iterator that is not a generator."""

    def __init__(self, is_closable: bool) -> None:
        self.left, self.is_closed = ["a", "b"], False
        if is_closable:
            self.aclose = self._aclose

    def __aiter__(self) -> Iterator:
        return self

    async def __anext__(self) -> str:
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop(0)

    async def _aclose(self) -> None:
        self.is_closed = True


async def test_tokens_come_from_any_asynchronous_iterator() -> None:
    for is_closable in (True, False):
        source = Iterator(is_closable)
        made = pieces(source, GenerationRequest(prompt="a"), token_timeout_s=10)
        assert "".join([each if isinstance(each, str) else each.text async for each in made]) == "ab"
        assert source.is_closed == is_closable
