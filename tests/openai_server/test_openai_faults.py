"""The OpenAI-compatible server with faulty engines and clients, without an instance."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tables import each_case

from daskserve.openai import EmbeddingRequest, GenerationRequest, Token, ToolCall
from daskserve.openai.model import ModelServer
from daskserve.openai.server import ModelFacts, OpenAIServer
from daskserve.testing import run_virtual

MESSAGES = [{"role": "user", "content": "x"}]


class Yields:
    """An engine that yields given items."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Any]:
        for each in self.outputs:
            yield each


class Handle:
    """The handle of a model in this process."""

    def __init__(self, engine: Any) -> None:
        self.server = ModelServer(lambda: engine, {}, token_timeout_s=10)
        self.generate = self.embed = self
        self.remote: Any = None

    def options(self, **options: Any) -> Handle:
        self.remote = self.server.generate if options.get("stream") else self.server.embed
        return self


def ask(engine: Any, path: str, **body: Any) -> httpx.Response:
    async def post() -> httpx.Response:
        handle = Handle(engine)
        handle.remote = handle.server.embed
        app = OpenAIServer({"m": handle}, {"m": ModelFacts(adapters=("*",))})
        transport = httpx.ASGITransport(app)  # which raises what the server does not catch
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post(f"/v1/{path}", json={"model": "m", **body})

    return run_virtual(post)


WRONG_CALL = Token(tool_calls=[ToolCall(0, "c", "f", {"a": 1})])  # type: ignore[arg-type]


@each_case(
    ("path", "body", "output"),
    [
        ("chat/completions", {"messages": MESSAGES}, WRONG_CALL),
        ("responses", {"input": "x"}, WRONG_CALL),
        ("chat/completions", {"messages": MESSAGES, "logprobs": True}, Token("\ud83d", logprob=-0.1)),
        ("completions", {"prompt": "x"}, Token("\ud83d")),
    ],
)
def test_an_output_that_cannot_be_written_is_an_error_of_the_usual_form(
    path: str, body: dict[str, Any], output: Token
) -> None:
    whole = ask(Yields("a", output), path, **body)
    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "server_error"
    before = "a" if body.get("logprobs") is None else Token("a", logprob=-0.1)
    stream = ask(Yields(before, output), path, stream=True, **body).text
    assert "The model has failed" in stream
    assert "response.failed" in stream or stream.endswith("data: [DONE]\n\n")


def test_the_name_of_a_model_may_be_anything() -> None:
    name = 'm:x"\0'
    answer = ask(Yields("a"), "chat/completions", model=name, messages=MESSAGES, stream=True)
    events = [json.loads(each[6:]) for each in answer.text.split("\n\n") if each.startswith("data: {")]
    assert {each["model"] for each in events} == {name}
    assert [each["choices"][0]["delta"].get("content") for each in events] == ["", "a", None]


class Embeds:
    """An engine that returns one vector of given values."""

    def __init__(self, *vector: float, delay_s: float = 0) -> None:
        self.vector = vector
        self.delay_s = delay_s

    async def embed(self, request: EmbeddingRequest) -> list[Any]:
        await asyncio.sleep(self.delay_s)
        return [self.vector for _ in request.inputs]


@each_case(
    ("engine", "encoding", "status"),
    [
        (Embeds(1.5), "float", 200),
        (Embeds(-3.4e38), "base64", 200),
        (Embeds(1e39), "float", 500),  # base64, which has numbers of four bytes, answers alike
        (Embeds(1e39), "base64", 500),
        (Embeds(1.0, math.nan), "float", 500),
        (Embeds(math.inf), "base64", 500),
        (Embeds(1.0, delay_s=11), "float", 408),
    ],
)
def test_vectors_that_cannot_be_sent_are_errors(engine: Embeds, encoding: str, status: int) -> None:
    answer = ask(engine, "embeddings", input="x", encoding_format=encoding)
    assert answer.status_code == status
    assert ("error" in answer.json()) == (status != 200)
    if status == 500:  # the engine's log has the number, the client's error does not
        assert answer.json()["error"]["type"] == "server_error"
        with pytest.raises(
            ValueError, match=f"embed returned {re.escape(repr(engine.vector[-1]))} in a vector"
        ):
            asyncio.run(ModelServer(lambda: engine, {}, 1.0).embed(EmbeddingRequest(inputs=["x"])))
