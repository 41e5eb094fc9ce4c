"""The OpenAI-compatible server on a real instance in this process, with the official client."""

from __future__ import annotations

import base64
import json
import re
import shlex
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from quick_instance import poll_for

import daskserve as serve
from daskserve.openai import build_app
from daskserve.testing import local_instance

openai: Any = pytest.importorskip("openai", reason="needs the extra test")

#: The model by import path, as in configuration files.
MODEL = {"engine": "echo_engine:Echo", "adapters": ["formal"], "token_timeout_s": 1.0}
USER = [{"role": "user", "content": "one two three"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def instance() -> Iterator[serve.Client]:
    with local_instance(http_options={"port": 0}) as client:
        models = {"echo": MODEL, "tuned": {"engine": "echo_engine:Adapted", "adapters": ["*"]}}
        client.run("daskserve.openai:build_app", args=models, name="llm", route_prefix="/llm")
        yield client


@pytest.fixture(scope="module")
def url(instance: serve.Client) -> str:
    return f"{instance.http_urls()[0]}/llm/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=30) as client:
        yield client


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_models_and_adapters_are_listed(client: Any) -> None:
    assert [each.id for each in client.models.list()] == ["echo", "echo:formal", "tuned"]
    assert client.models.retrieve("echo:formal").owned_by == "daskserve"
    for name in ("other", "echo:rude", "echo:"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        assert caught.value.code == "model_not_found"


def test_a_chat_is_answered(client: Any) -> None:
    answer = client.chat.completions.create(model="echo:formal", messages=USER, stop=["o th"], n=2)
    assert [each.message.content for each in answer.choices] == ["one tw", "one tw"]
    assert [each.finish_reason for each in answer.choices] == ["stop", "stop"]
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 6, 9)
    cut = client.chat.completions.create(model="echo", messages=USER, max_completion_tokens=2)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("one two ", "length")


def test_a_chat_streams(client: Any) -> None:
    with client.chat.completions.create(
        model="echo", messages=USER, n=2, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert len({each.id for each in chunks}) == 1
    for index in range(2):
        choices = [one for each in chunks for one in each.choices if one.index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in choices) == "one two three "
        assert [each.finish_reason for each in choices if each.finish_reason] == ["stop"]
    assert [each.usage.total_tokens for each in chunks if each.usage] == [9]


def test_probabilities_are_reported(client: Any) -> None:
    chat = client.chat.completions.create(model="echo", messages=USER, logprobs=True, top_logprobs=1)
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [each.token for each in logprobs.content] == ["one ", "two ", "three "]
    assert logprobs.content[0].top_logprobs[0].logprob == -9999  # of minus infinity, which JSON lacks
    plain = client.completions.create(model="echo", prompt="a b", logprobs=1, echo=True).choices[0]
    assert plain.text == "a ba b "
    assert plain.logprobs is not None
    assert (plain.logprobs.tokens, plain.logprobs.text_offset) == (["a ", "b "], [3, 5])


def test_adapters_are_loaded_by_multiplexing(client: Any) -> None:
    def ask(model: str) -> str:
        return client.chat.completions.create(model=model, messages=USER).choices[0].message.content  # type: ignore[no-any-return]

    assert [ask(f"tuned{each}") for each in ("", ":ab", ":ab", ":abcd")] == [
        "none 0",
        "AB 1",
        "AB 1",
        "ABCD 2",
    ]
    for unknown in ("abc", "a" * 100_000):
        with pytest.raises(openai.APIStatusError) as caught:
            ask(f"tuned:{unknown}")
        assert caught.value.status_code in (400, 404)
    assert caught.value.type == "invalid_request_error"


def test_tools_are_called(client: Any) -> None:
    (choice,) = client.chat.completions.create(model="echo", messages=USER, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    with client.chat.completions.stream(model="echo", messages=USER, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"a": 1}'


def test_prompts_are_completed(client: Any) -> None:
    answer = client.completions.create(model="echo", prompt=["a b", "c"], n=2, max_tokens=5)
    assert [each.text for each in answer.choices] == ["a b ", "a b ", "c ", "c "]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    chunks = list(client.completions.create(model="echo", prompt=[4, 5], stream=True))
    assert "".join(each.choices[0].text for each in chunks) == "4 5 "
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_texts_are_embedded(client: Any, url: str) -> None:
    found = client.embeddings.create(model="echo", input=["a", "bcd"])
    assert [each.embedding for each in found.data] == [[1.5, 1.0], [1.5, 3.0]]
    assert found.usage.prompt_tokens == 4
    body = {"model": "echo", "input": "ab", "encoding_format": "base64", "dimensions": 1}
    answer = httpx.post(f"{url}/embeddings", json=body).json()
    assert base64.b64decode(answer["data"][0]["embedding"]) == struct.pack("<f", 1.5)
    with pytest.raises(openai.InternalServerError, match="log has the error"):
        client.embeddings.create(model="echo", input="one too few")


def test_responses_are_made(client: Any) -> None:
    response = client.responses.create(model="echo", input="one two", max_output_tokens=1)
    assert (response.output_text, response.status) == ("one ", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    tools: Any = [{"type": "function", "name": "add", "parameters": {}}]
    with client.responses.stream(model="echo", input="one", tools=tools) as stream:
        kinds = [each.type for each in stream]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("add", '{"a": 1}')
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert kinds.count("response.created") == 1
    with client.responses.stream(model="echo", input="one two") as stream:
        text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == "one two "
        usage = stream.get_final_response().usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (2, 2)


def test_answers_and_events_have_the_fields_that_openai_declares(client: Any) -> None:
    """The official client accepts answers with missing fields or wrong types; other clients do not."""
    chat = {"model": "echo", "messages": USER}
    prompt = {"model": "echo", "prompt": "a b"}
    function = {"type": "function", "name": "add", "parameters": {}}
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    answers = [
        client.chat.completions.create(**chat, logprobs=True, top_logprobs=1),
        client.chat.completions.create(**chat, tools=TOOLS),
        *client.chat.completions.create(**chat, logprobs=True, top_logprobs=1, **with_usage),
        *client.chat.completions.create(**chat, tools=TOOLS, stream=True),
        client.completions.create(**prompt, logprobs=1),
        client.embeddings.create(model="echo", input=["a"], encoding_format="float"),
        *client.models.list(),
    ]
    for options in ({"input": "one"}, {"input": "one", "tools": [function]}, {"input": "a fail"}):
        events = list(client.responses.create(model="echo", stream=True, **options))
        assert [each.sequence_number for each in events] == list(range(len(events)))
        answers += events
        if "fail" not in options["input"]:
            answers.append(client.responses.create(model="echo", **options))
    for each in answers:
        type(each).model_validate(each.to_dict())


def test_errors_have_the_form_of_openai(client: Any) -> None:
    cases: list[tuple[dict[str, Any], int, str | None, str | None]] = [
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"temperature": 3}, 400, "invalid_value", "temperature"),
        ({"max_tokens": 50}, 400, "context_length_exceeded", "messages"),
        ({"messages": says("a " * 60)}, 400, "context_length_exceeded", "messages"),
        ({"messages": says("busy")}, 503, "overloaded", None),
        ({"messages": says("hang")}, 408, "timeout", None),
        ({"messages": says("fail")}, 500, None, None),
    ]
    for stream in (False, True):
        for changes, status, code, param in cases:
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(
                    **{"model": "echo", "messages": USER, "stream": stream, **changes}
                )
            error = caught.value
            assert (error.status_code, error.code, error.param) == (status, code, param), error
            assert "secret" not in error.message
            assert error.request_id
            assert (error.response.headers.get("retry-after") == "7") == (status == 503)


def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_an_error(client: Any) -> None:
    stream = client.chat.completions.create(model="echo", messages=says("a b fail c"), stream=True)
    found = (chunk.choices[0].delta.content or "" for chunk in stream)
    assert [next(found) for _ in range(3)] == ["", "a ", "b "]
    with pytest.raises(openai.APIError, match="log has the error"):
        next(found)
    events = list(client.responses.create(model="echo", input="a hang", stream=True))
    assert [each.type for each in events[-2:]] == ["error", "response.failed"]
    assert events[-2].code == "timeout"


def test_other_requests_are_refused_in_the_same_form(url: str) -> None:
    json_type = {"content-type": "application/json"}
    for method, path, content, headers, status in [
        ("POST", "files", b"", {}, 404),
        ("GET", "chat/completions", b"", {}, 404),
        ("POST", "chat/completions", b"{}", {"content-type": "text/xml"}, 415),
        ("POST", "chat/completions", b"[" * 10_000, json_type, 400),
        ("POST", "chat/completions", b"\xff", json_type, 400),
        ("POST", "embeddings", b"", {}, 400),
    ]:
        answer = httpx.request(method, f"{url}/{path}", content=content, headers=headers)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_leaves_frees_the_engine(instance: serve.Client) -> None:
    model = {"engine": "echo_engine:Echo", "token_timeout_s": None}
    instance.run(build_app({"echo": model}), name="patient", route_prefix="/patient")
    url = f"{instance.http_urls()[0]}/patient/v1"
    engine = instance.get_deployment_handle("echo", app_name="patient")

    def count() -> float:
        return float(engine.record_autoscaling_stats.remote().result()["open"])

    body = {"model": "echo", "messages": says("one hang"), "n": 3}
    with httpx.stream("POST", f"{url}/chat/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        next(answer.iter_lines())
        poll_for(lambda: count() == 3, what=lambda: f"open: {count()}")
    poll_for(lambda: count() == 0, what=lambda: f"open: {count()}")
    for silent in ({}, {"messages": says("hang"), "stream": True}):  # no part of an answer is written
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/chat/completions", json={**body, **silent}, timeout=1)
        poll_for(lambda: count() == 0, what=lambda: f"open: {count()}")


def test_the_session_and_the_priority_of_a_request_go_to_the_model(instance: serve.Client) -> None:
    routed = {"num_replicas": 3, "request_router_config": {"request_router_class": "ConsistentHash"}}
    model = {"engine": "echo_engine:Witness", "deployment": routed}
    app = build_app({"m": model}, server={"priority_config": {"header": "X-Priority"}})
    instance.run(app, name="sessions", route_prefix="/sessions")
    url = f"{instance.http_urls()[0]}/sessions/v1/chat/completions"

    def ask(session: str) -> list[str]:
        headers = {"X-Session-Id": session, "X-Priority": "7"}
        answer = httpx.post(url, json={"model": "m", "messages": USER}, headers=headers).json()
        return str(answer["choices"][0]["message"]["content"]).split()

    homes = set()
    for session in "abcdefgh":
        ((home, *facts),) = {tuple(ask(session)) for _ in range(4)}
        assert facts == [session, "7"]
        homes.add(home)
    assert len(homes) > 1
    body = {"model": "m", "input": "x"}
    answer = httpx.post(url.replace("chat/completions", "embeddings"), json=body, headers={"X-Priority": "7"})
    assert answer.json()["data"][0]["embedding"] == [1, 7]  # they may run twice


def test_a_user_config_needs_an_engine_that_takes_it(instance: serve.Client) -> None:
    model = {"engine": "echo_engine:Echo", "deployment": {"user_config": {"a": 1}}}
    with pytest.raises(serve.errors.DeployError, match="no method reconfigure"):
        instance.run(build_app({"m": model}), name="other", route_prefix="/other")


def test_the_page_is_true(
    instance: serve.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/openai.md").read_text(encoding="utf-8")
    program, calls, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    printed, curls, *_ = re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    address = instance.http_urls()[0]
    monkeypatch.setattr(serve, "run", lambda app, **_: instance.run(app, name="page", route_prefix="/"))
    exec(program, {})
    names: dict[str, Any] = {}
    exec(calls.replace("http://127.0.0.1:8000", address), names)
    names["client"].close()
    assert re.sub(" +$", "", capsys.readouterr().out, flags=re.MULTILINE) == printed
    for command, output in re.findall(r"^\$ (.*)\n(.*)\n", curls, re.MULTILINE):
        _, target, _, body = shlex.split(command)
        path = target.removeprefix("http://127.0.0.1:8000")
        answer = httpx.post(address + path, content=body, headers={"content-type": "application/json"})
        assert answer.text == output
    instance.delete_application("page")
