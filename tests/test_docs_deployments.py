"""The page about deployments is true: its example runs, and its tables are complete."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import daskserve as serve
from daskserve.data.replica.user_code.definitions import HOOKS
from daskserve.options.actor import ActorOptions
from daskserve.options.fields.ray_names import TRANSLATED

TEXT = (Path(__file__).parent.parent / "docs/deployments.md").read_text()


def section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("title", ["What a replica knows", "Threads and event loops"])
def test_the_example_runs(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deployments_guide")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (example,) = re.findall(r"```python\n(.*?)```", section(title), re.DOTALL)
    try:
        exec(compile(example, "docs/deployments.md", "exec", dont_inherit=True), vars(module))
    finally:
        serve.shutdown()


def test_every_method_that_daskserve_calls_is_listed() -> None:
    rows = re.findall(r"^\| `(\w+)", section("Methods that daskserve calls"), re.MULTILINE)
    assert set(rows) == HOOKS | {"__init__", "__del__"}


def test_every_attribute_of_the_context_exists() -> None:
    rows = " ".join(re.findall(r"^\| (`.*?) \|", section("What a replica knows"), re.MULTILINE))
    names = re.findall(r"`(\w+)`", rows)
    assert len(names) > 5
    assert [name for name in names if not hasattr(serve.context.ReplicaContext, name)] == []


def test_every_translated_name_is_listed_and_every_resource_is_an_option() -> None:
    text = section("Names of Ray Serve")
    assert [name for name in TRANSLATED if name not in text] == []
    (resources,) = re.findall(r'`ray_actor_options=\{("num_cpus".*?)\}`', text)
    assert set(re.findall(r"\w+", resources)) <= set(ActorOptions.model_fields)
