"""The chat example: its model, and its engine behind OpenAI's interface in this process."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.requests import Request

from daskserve.openai import GenerationRequest, build_app
from daskserve.testing import local_instance

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "chat"
sys.path.insert(0, str(EXAMPLE))

import chat_demo  # noqa: E402 - the example's folder must be in the path first
import chat_engine  # noqa: E402
import ngram  # noqa: E402

PARAGRAPHS = [
    "A cat sleeps in the sun all day long.",
    "A dog runs in the park all day long.",
    "The moon shines at night while every owl is awake.",
]


def test_a_page_becomes_paragraphs() -> None:
    page = "# Cats\n\nA [cat](cat.md) sleeps in the `sun` all day\nlong.\n\n| a | b |\n\n- short."
    assert ngram.paragraphs_of(page) == PARAGRAPHS[:1]


def test_the_model_answers_with_what_it_has_read_and_tokens_make_the_text() -> None:
    model = ngram.Model(PARAGRAPHS)
    assert "".join(model.tokens(PARAGRAPHS[2])) == PARAGRAPHS[2]
    for text in PARAGRAPHS:
        writing, written = model.begin(question=text.split()[1]), ""
        while (token := int(model.steps([writing])[0].argmax())) != ngram.END:
            written += model.vocabulary[token]
            model.go_on(writing, token)
        assert written == text
    # One step for several texts gives each text the same result as a separate step.
    texts = [model.begin(text="The moon"), model.begin(text="A dog")]
    together = model.steps(texts)
    assert np.allclose(together, [model.steps([each])[0] for each in texts])
    assert [model.vocabulary[each] for each in together.argmax(axis=1)] == [" shines", " runs"]


def test_low_temperatures_and_small_top_p_choose_the_likeliest() -> None:
    row = np.array([0.2, 0.5, 0.3])
    for options in ({"temperature": 0}, {"top_p": 0.1, "temperature": 2}):
        assert chat_engine.tempered(row, GenerationRequest(**options)).tolist() == [0, 1, 0]  # type: ignore[arg-type]
    assert np.allclose(chat_engine.tempered(row, GenerationRequest(temperature=1)), row)
    flat = np.full(5000, 1 / 5000)  # of which the hundredth power is too small for a float
    assert np.allclose(chat_engine.tempered(flat, GenerationRequest(temperature=0.01)), flat)


def test_the_page_runs_its_own_script_only_and_talks_to_its_own_server_only() -> None:
    html = (EXAMPLE / "page.html").read_text(encoding="utf-8")
    answer = asyncio.run(chat_demo.Page(html)(Request({"type": "http"})))
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; connect-src 'self'; " in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert "location" not in script  # the address of the page chooses nothing


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with local_instance(http_options={"port": 0}) as client:
        client.run(build_app({"small": chat_engine.config(PARAGRAPHS)}))
        yield f"{client.http_urls()[0]}/v1"


def ask(url: str, **options: Any) -> Any:
    body = {"model": "small", "messages": [{"role": "user", "content": "What does the dog do?"}], **options}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=30).json()


def test_the_engine_answers_alike_with_the_same_seed(url: str) -> None:
    first, second = (ask(url, seed=3, temperature=1.0, n=2)["choices"] for _ in range(2))
    assert first == second
    negative, huge = (ask(url, seed=seed)["choices"] for seed in (-1, 2**63 - 1))
    assert negative[0]["message"]["content"]
    assert huge[0]["message"]["content"]
    (cold,) = ask(url, temperature=0, logprobs=True, top_logprobs=2)["choices"]
    assert cold["message"]["content"] == PARAGRAPHS[1]
    assert cold["finish_reason"] == "stop"
    assert all(len(each["top_logprobs"]) in (1, 2) for each in cold["logprobs"]["content"])
    (cut,) = ask(url, temperature=0, max_tokens=2)["choices"]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("A dog", "length")


def test_similar_texts_have_similar_vectors(url: str) -> None:
    texts = ["the cat sleeps", "a cat that sleeps", "an owl at night"]
    answer = httpx.post(f"{url}/embeddings", json={"model": "small", "input": texts}).json()
    cat, also_cat, owl = (np.array(each["embedding"]) for each in answer["data"])
    assert cat @ also_cat > 0.9 > cat @ owl
    wrong = httpx.post(f"{url}/embeddings", json={"model": "small", "input": "x", "dimensions": 60_000})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "dimensions")
