"""Every block of the README runs unchanged; the first block and the commands run in tests/integration."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import daskserve as serve
from daskserve.testing import local_instance

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def block(part: str) -> str:
    (found,) = [each for each in BLOCKS if part in each]
    return str(found)


@pytest.fixture(scope="module")
def instance() -> Iterator[serve.Client]:
    with local_instance(http_options={"port": 0}) as client:
        yield client


@pytest.fixture
def url(instance: serve.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(serve, "run", instance.run)
    yield instance.http_urls()[0]
    for name in instance.status().applications:
        instance.delete_application(name)


def paste(part: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "a_reader"}
    exec(compile(block(part), "README.md", "exec", dont_inherit=True), names)
    return names


def test_the_readme_is_one_page() -> None:
    assert len(TEXT.splitlines()) <= 200


def test_no_block_is_left_out() -> None:
    parts = ["Greeter", "FastAPI", "Translator", "Client(", "serve.batch", "yield", "autoscaling_config"]
    assert [block(part) for part in parts] == BLOCKS


@pytest.mark.parametrize(
    ("part", "request_", "answer"),
    [
        ("Translator", ("GET", "/?word=hello"), "bonjour"),
        ("serve.batch", ("POST", "/", "[1, 2, 3]"), "6"),
        ("yield", ("GET", "/?to=3"), "0\n1\n2\n"),
        ("autoscaling_config", ("GET", "/?word=hello"), "HELLO"),
    ],
)
def test_an_application_answers(part: str, request_: tuple[str, ...], answer: str, url: str) -> None:
    paste(part)
    method, path, *body = request_
    response = httpx.request(method, url + path, content="".join(body), timeout=30)
    assert (response.status_code, response.text) == (200, answer)


def test_the_fastapi_application_answers_curl(
    url: str, instance: serve.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop.py").write_text(block("FastAPI"))
    monkeypatch.syspath_prepend(tmp_path)
    instance.run("shop:app")
    ((command, answer),) = re.findall(r"`(curl .*)` prints `(.*)`", TEXT)
    words = shlex.split(command.replace("http://127.0.0.1:8000", url))
    ended = subprocess.run([*words, "-sS"], capture_output=True, text=True, timeout=30)
    assert (ended.stdout, ended.stderr) == (answer, "")
