"""The examples of docs/handles.md and docs/batch_inference.md work unchanged."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import dask
import pytest

import daskserve as serve
from daskserve.data.caller.calls.call_options import OPTIONS

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "handles.md").read_text()


#: The heading of the part that needs pandas.
NIGHTLY = "## A nightly scoring"


def run_examples(monkeypatch: pytest.MonkeyPatch, page: str, text: str) -> None:
    module = ModuleType("handles_guide")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run = serve.run
    monkeypatch.setattr(serve, "run", lambda target, **options: run(target, local=True, **options))
    try:
        for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            with dask.config.set(scheduler="threads"):
                exec(compile(example, f"docs/{page}", "exec", dont_inherit=True), vars(module))
    finally:
        serve.shutdown()


@pytest.mark.parametrize("page", ["handles.md", "batch_inference.md"])
def test_the_examples_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    run_examples(monkeypatch, page, (DOCS / page).read_text().partition(NIGHTLY)[0])


def test_the_nightly_scoring_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    page = "batch_inference.md"
    text = (DOCS / page).read_text().partition(NIGHTLY)[2]
    run_examples(monkeypatch, page, "```python\nimport daskserve as serve\n```" + text)


def test_the_table_of_options_is_complete() -> None:
    table = TEXT.partition("## Options")[2].partition("\n## ")[0]
    rows = " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", rows)) == set(OPTIONS)
