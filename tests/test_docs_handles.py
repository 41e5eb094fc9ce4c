"""The examples of docs/handles.md work as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import daskserve as serve
from daskserve.data.caller.calls.call_options import option_names

TEXT = (Path(__file__).parent.parent / "docs/handles.md").read_text()


def test_the_examples_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("handles_guide")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run = serve.run
    monkeypatch.setattr(serve, "run", lambda target, **options: run(target, local=True))
    try:
        for example in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(compile(example, "docs/handles.md", "exec", dont_inherit=True), vars(module))
    finally:
        serve.shutdown()


def test_the_table_of_options_is_complete() -> None:
    table = TEXT.partition("## Options")[2].partition("\n## ")[0]
    rows = " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", rows)) == set(option_names())
