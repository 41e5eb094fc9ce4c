"""The examples of docs/migrating.md for the classic system work as they stand.

`test_docs_guides` runs the one for today's Ray Serve.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import daskserve as serve

PAGE = (Path(__file__).parent.parent / "docs/migrating.md").read_text()
TEXT = PAGE.partition("\n## From the classic system")[2]


@serve.deployment
def nothing() -> None: ...


@pytest.fixture
def _instance(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples use an instance in this process."""

    def start() -> None:
        serve.run(nothing.bind(), local=True, name="unrelated")

    monkeypatch.setattr(serve, "start", start)
    yield
    serve.shutdown()


@pytest.mark.usefixtures("_instance")
def test_the_examples_run() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for example in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(example, "docs/migrating.md", "exec", dont_inherit=True), namespace)
    product, backends = asyncio.run(namespace["call"]())
    assert product == 8
    assert {"hello:v1", "hello:v2"} <= set(backends)
