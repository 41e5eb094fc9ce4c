"""What the documents say is what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from daskserve.config import BackendConfig, HTTPOptions

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def documenter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("document_options", ROOT / "scripts/document_options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
