"""Programs of other clients of OpenAI's interface, against the engine `echo_engine`: ``NAME URL``.

Each is a separate process, because these libraries leave connections open.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

USER = [{"role": "user", "content": "one two three"}]
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


def use_litellm(url: str) -> None:
    import litellm

    options: dict[str, Any] = {"model": "openai/echo", "api_base": url, "api_key": "-", "num_retries": 0}
    answer = litellm.completion(messages=USER, stop=["three"], **options)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one two ", "stop")
    assert answer.usage.total_tokens == 6
    chunks = list(litellm.completion(messages=USER, stream=True, **options))
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == "one two three "
    called = litellm.completion(messages=USER, tools=[TOOL], **options).choices[0].message.tool_calls[0]
    assert (called.function.name, called.function.arguments) == ("add", '{"a": 1}')
    found = litellm.embedding(input=["a", "bcd"], encoding_format="float", **options)
    assert found.data[1]["embedding"] == [1.5, 3.0]
    responses = litellm.responses(input="one two", **options)
    assert responses.output[0].content[0].text == "one two "
    for content, expected in (("busy", 503), ("a " * 60, 400), ("fail", 500)):
        with pytest.raises(Exception, match="") as caught:
            litellm.completion(messages=[{"role": "user", "content": content}], max_retries=0, **options)
        assert caught.value.status_code == expected


def use_langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    options: dict[str, Any] = {"model": "echo", "base_url": url, "api_key": "-", "max_retries": 0}
    chat = ChatOpenAI(**options)
    answer = chat.invoke("one two three", stop=["three"])
    assert (answer.content, answer.response_metadata["finish_reason"]) == ("one two ", "stop")
    assert answer.usage_metadata["total_tokens"] == 6
    assert "".join(each.content for each in chat.stream("one two three")) == "one two three "
    assert chat.bind_tools([TOOL]).invoke("add").tool_calls[0]["args"] == {"a": 1}
    responses = ChatOpenAI(use_responses_api=True, **options)
    assert responses.invoke("one two").text == "one two "
    assert "".join(each.text for each in responses.stream("one two")) == "one two "
    embeddings = OpenAIEmbeddings(check_embedding_ctx_length=False, **options)
    assert embeddings.embed_documents(["a", "bcd"]) == [[1.5, 1.0], [1.5, 3.0]]
    with pytest.raises(Exception, match="log has the error"):
        chat.invoke("fail")


PROGRAMS: Mapping[str, Any] = {"litellm": use_litellm, "langchain_openai": use_langchain}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2])
