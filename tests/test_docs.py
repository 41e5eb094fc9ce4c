"""What the documents say is what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from daskserve.config import BackendConfig, HTTPOptions
from daskserve.figures import CAUSES

ROOT = Path(__file__).parent.parent


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def documenter() -> ModuleType:
    return load_script("document_options")


def test_the_option_tables_of_the_readme_are_up_to_date(documenter: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    assert documenter.rendered(text) == text, "run python scripts/document_options.py"


def test_an_outdated_table_is_noticed(documenter: ModuleType) -> None:
    old = "<!-- options: HTTPOptions -->\n| `port` | `1` | wrong |\n<!-- end -->"
    new = documenter.rendered(old)
    assert "wrong" not in new
    assert "| `port` | `8000` |" in new


def test_a_table_names_every_option_and_its_other_spelling(documenter: ModuleType) -> None:
    text = documenter.table(BackendConfig)
    for name in BackendConfig.model_fields:
        assert (f"`{name}`" in text) == (name != "internal_metadata")
    assert "`max_concurrent_queries` or `max_ongoing_requests`" in text


@pytest.mark.parametrize("model", [BackendConfig, HTTPOptions])
def test_every_option_says_what_it_means(model: type[BackendConfig | HTTPOptions]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_the_list_of_metrics_is_up_to_date() -> None:
    script = load_script("document_metrics")
    text = (ROOT / "docs/metrics.md").read_text()
    assert script.rendered(text) == text, "run python scripts/document_metrics.py"
    outdated = text.replace("| Health probes that failed. |", "| wrong |")
    assert outdated != text
    assert script.rendered(outdated) == text


def test_all_words_for_causes_are_explained() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    assert [cause for cause in CAUSES.values() if f"`{cause}`" not in text] == []
