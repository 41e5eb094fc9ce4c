"""The examples of docs/migrating.md for the classic system work unchanged.

`test_docs_guides` runs the one for today's Ray Serve.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import daskserve as serve
from daskserve import classic, request_router

PAGE = (Path(__file__).parent.parent / "docs/migrating.md").read_text()
TEXT = PAGE.partition("\n## From the classic system")[2]


@serve.deployment
def nothing() -> None: ...


@pytest.fixture
def _instance(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the examples use an instance in this process."""

    def start() -> None:
        serve.run(nothing.bind(), local=True, name="unrelated")

    monkeypatch.setattr(classic, "start", start)
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


def names_of(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_every_public_name_of_ray_serve_is_here_or_said_not_to_be() -> None:
    rows = PAGE.partition("### Every public name")[2].partition("\n### ")[0]
    found = re.findall(r"^\| `ray[\w.]*`(?: is `([\w.]+)`)? \|(.*?)\|(.*?)\|$", rows, re.MULTILINE)
    assert len(found) == 23
    for module, same, missing in found:
        place = importlib.import_module(module or "daskserve")
        assert [name for name in names_of(same) if not hasattr(place, name)] == []
        listed = {name for part in missing.split(". ") for name in names_of(part.partition(":")[0])}
        assert [name for name in listed if module and hasattr(place, name)] == []
        if module.count("."):  # what the module exports beyond Ray Serve's names is documented elsewhere
            assert set(getattr(place, "__all__", ())) - set(names_of(same)) <= {
                "DeploymentIsBeingDeletedError",
                "ExternalScalerDisabledError",
                *(name for name in request_router.__all__ if "Router" in name),
                *("DeploymentID", "RequestMetadata"),
                *("Handle", "Response", "ResponseGenerator", "resume_stream", "Explanation"),
                *("ActorOptions", "BackendConfig", "Environment"),
            }
