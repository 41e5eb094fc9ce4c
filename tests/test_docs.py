"""The documents match the code."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from grafana.dashboards import DASHBOARDS
from tables import each_case

import daskserve as serve
from daskserve.options.backend import BackendConfig
from daskserve.options.http import HTTPOptions
from daskserve.telemetry.histogram import CAUSES

ROOT = Path(__file__).parent.parent


SCRIPTS = str(ROOT / "scripts")


def load_script(name: str) -> ModuleType:
    sys.path.insert(0, SCRIPTS)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(SCRIPTS)
        for each in (name, "generated_tables"):
            sys.modules.pop(each, None)


@pytest.fixture(scope="module")
def documenter() -> ModuleType:
    return load_script("document_options")


def test_the_option_tables_are_up_to_date(documenter: ModuleType) -> None:
    text = (ROOT / "docs/options.md").read_text()
    assert documenter.TABLES.rendered(text) == text, "run python scripts/document_options.py"


def test_an_outdated_table_is_regenerated(documenter: ModuleType) -> None:
    old = "<!-- options: HTTPOptions -->\n| `port` | `1` | wrong |\n<!-- end -->"
    new = documenter.TABLES.rendered(old)
    assert "wrong" not in new
    assert "| `port` | `8000` (0 to 65535) |" in new


def test_a_table_names_every_option_and_its_alias(documenter: ModuleType) -> None:
    text = documenter.table(BackendConfig)
    for name in BackendConfig.model_fields:
        assert (f"`{name}`" in text) == (name != "internal_metadata")
    assert "`max_ongoing_requests` or `max_concurrent_queries`" in text


@each_case("model", [BackendConfig, HTTPOptions])
def test_every_option_has_a_description(model: type[BackendConfig | HTTPOptions]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_the_pages_of_reference_are_up_to_date() -> None:
    for each in load_script("document_reference").TABLES:
        text = (ROOT / each.document).read_text()
        assert each.rendered(text) == text, "run python scripts/document_reference.py"


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    found = set(re.findall(r"::: daskserve\.(\w+)", text)) | set(re.findall(r"`(\w+)`", text))
    found |= {"ServeError", "errors"}  # docs/errors.md
    found |= {"config", "exceptions", "handle", "schema"}  # Ray Serve's names, in docs/migrating.md
    names = {name.removesuffix("_async") for name in serve.__all__ if not name.startswith("_")}
    assert names - found == set()


def test_every_error_has_a_cause_and_a_remedy() -> None:
    rows = re.findall(r"^\| <a.*?></a>`\w+Error`.*\|$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert len(rows) > 40
    assert [row for row in rows if any(not cell.strip() for cell in row.split("|")[1:-1])] == []


def test_the_list_of_metrics_is_up_to_date() -> None:
    script = load_script("document_metrics")
    text = (ROOT / "docs/metrics.md").read_text()
    assert script.TABLES.rendered(text) == text, "run python scripts/document_metrics.py"
    outdated = text.replace("| Failed health checks. |", "| wrong |")
    assert outdated != text
    assert script.TABLES.rendered(outdated) == text


def test_each_metric_of_ray_serve_has_one_that_exists_or_a_reason() -> None:
    script = load_script("ray_metrics")
    text = (ROOT / "docs/metrics.md").read_text()
    assert script.TABLES.rendered(text) == text, "run python scripts/ray_metrics.py"
    named = {name for ours in script.RAY.values() for name in re.findall(r"`(\w+)`", ours)}
    assert named - script.METRICS.keys() == {"code", "endpoint"}  # labels


def test_the_metrics_page_explains_every_cause() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    assert [cause for cause in CAUSES.values() if f"`{cause}`" not in text] == []


def test_the_table_of_alerts_is_up_to_date() -> None:
    script = load_script("document_alerts")
    text = (ROOT / "docs/grafana.md").read_text()
    assert script.TABLES.rendered(text) == text, "run python scripts/document_alerts.py"
    outdated = text.replace("| critical | 1m |", "| critical | 2m |")
    assert outdated != text
    assert script.TABLES.rendered(outdated) == text


def test_each_dashboard_row_has_an_image_with_all_its_panels() -> None:
    text = (ROOT / "docs/grafana.md").read_text()
    shown = re.findall(r"\(screens/(.*?)\)", text)
    wanted = []
    for dashboard in DASHBOARDS:
        for row in (row for row in dashboard.rows if "no data" not in row.title):
            name = f"{dashboard.uid.removeprefix('daskserve-')}-{row.title.lower().replace(' ', '-')}.svg"
            wanted.append(name)
            drawing = ElementTree.parse(ROOT / "docs/screens" / name)
            texts = {element.text for element in drawing.iter() if element.tag.endswith("text")}
            assert [panel.title for panel in row.panels if panel.title not in texts] == [], "draw_screens.py"
            assert "No data" not in texts
    assert shown == wanted
    drawn = [*(ROOT / "docs/screens").glob("overview-*"), *(ROOT / "docs/screens").glob("deployment-*")]
    assert {path.name for path in drawn} == set(wanted)
