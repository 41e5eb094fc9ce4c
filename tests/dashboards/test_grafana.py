"""Dashboards as Grafana's JSON: ids, layout, variables, links and expressions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import write_dashboards
import yaml
from click.testing import CliRunner, Result
from grafana.dashboards import DASHBOARDS, as_json
from grafana.panels import GRID_COLUMNS, Dashboard, Panel, PanelKind, Query, Row, placed
from grafana.promql import gauge, mean, quantile, rate

from daskserve.cli.main import main
from daskserve.dashboards.files import files
from daskserve.telemetry.table import METRICS

#: Metrics that Prometheus and prometheus_client export in addition.
FOREIGN = {"up", "ALERTS", "process_cpu_seconds_total", "process_resident_memory_bytes"}
EXPORTED = {spec.exported_name for spec in METRICS.values()}
ENDINGS = re.compile(r"_(bucket|sum|count)$")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["metrics", "grafana", *arguments])


@pytest.fixture(params=DASHBOARDS, ids=lambda each: each.uid)
def dashboard(request: pytest.FixtureRequest) -> Dashboard:
    found: Dashboard = request.param
    return found


def test_the_files_are_up_to_date() -> None:
    for path, text in write_dashboards.generated().items():
        assert path.read_text() == text, "run python scripts/write_dashboards.py"


def test_links_lead_to_existing_dashboards() -> None:
    """The ids appear in bookmarks and links, so they must not change."""
    assert [each.uid for each in DASHBOARDS] == ["daskserve-overview", "daskserve-deployment"]
    for each in DASHBOARDS:
        text = json.dumps(as_json(each))
        linked = set(re.findall(r'"/d/([\w-]+)\?', text))
        assert linked == {other.uid for other in DASHBOARDS if each is not other}
    assert "var-deployment=${__field.labels.deployment}" in json.dumps(as_json(DASHBOARDS[0]))


def test_panels_fill_the_grid_and_do_not_overlap(dashboard: Dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    for _, place in placed(dashboard):
        cells = {(place.x + x, place.y + y) for x in range(place.width) for y in range(place.height)}
        assert not cells & taken
        assert place.x + place.width <= GRID_COLUMNS
        taken |= cells
    heights = {y for _, y in taken}
    assert taken == {(x, y) for x in range(GRID_COLUMNS) for y in heights}
    assert heights == set(range(len(heights)))


def test_a_panel_that_does_not_fit_starts_a_new_line() -> None:
    wide, small = Panel("wide", "", [], width=20), Panel("small", "", [], height=4)
    found = placed(Dashboard("u", "t", "d", [Row("r", [small, wide, small]), Row("s", [small])]))
    assert [(place.x, place.y) for _, place in found] == [(0, 0), (0, 1), (0, 5), (0, 13), (0, 17), (0, 18)]


def test_each_panel_is_complete(dashboard: Dashboard) -> None:
    found = as_json(dashboard)
    panels = [each for each in found["panels"] if each["type"] != "row"]
    assert len({each["id"] for each in found["panels"]}) == len(found["panels"])
    assert len({each["title"] for each in panels}) == len(panels)
    for each in panels:
        assert each["title"]
        assert each["description"].endswith(".")
        assert [target["refId"] for target in each["targets"]] == list("ABCDEFGH"[: len(each["targets"])])
        assert {target["datasource"]["uid"] for target in each["targets"]} == {"${datasource}"}
        assert len(each["targets"]) == 1 or all(target["legendFormat"] for target in each["targets"])


def test_legends_name_labels_that_the_series_have(dashboard: Dashboard) -> None:
    for panel in dashboard.panels():
        for query in panel.queries:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", query.legend)) - {"le"}
            wanted |= {name for name, _ in panel.columns} if "ALERTS" not in query.expression else set()
            grouped = set(re.split(r",\s*", ",".join(re.findall(r"by \(([\w, ]+)\)", query.expression))))
            assert wanted <= grouped, (panel.title, query)


def test_expressions_use_exported_metrics(dashboard: Dashboard) -> None:
    for panel in dashboard.panels():
        for query in panel.queries:
            text = re.sub(r'"[^"]*"', '""', query.expression)
            names = set(re.findall(r"\b(?:daskserve_|process_)\w+|\bup\b|\bALERTS\b", text))
            assert names
            unknown = {name for name in names if ENDINGS.sub("", name) not in EXPORTED | FOREIGN}
            assert unknown == set(), panel.title


def test_the_page_of_one_deployment_selects_exactly_one(dashboard: Dashboard) -> None:
    variables = {each["name"]: each for each in as_json(dashboard)["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "serve_instance", "deployment"]
    assert variables["deployment"]["multi"] is not dashboard.is_for_one_deployment
    used = set(re.findall(r"\$(\w+)", " ".join(q.expression for p in dashboard.panels() for q in p.queries)))
    assert used == {"job", "serve_instance", "deployment", "__rate_interval"}


def test_unknown_metrics_and_labels_are_refused() -> None:
    with pytest.raises(KeyError):
        gauge("no_such_metric")
    with pytest.raises(ValueError, match="has no labels"):
        rate("http_requests", ("deployment",))
    for make in (
        lambda: quantile(0.5, "goals_pending"),
        lambda: mean("goals"),
        lambda: rate("goals_pending"),
    ):
        with pytest.raises(AssertionError):
            make()


def test_a_table_shows_its_columns_and_no_others() -> None:
    table = Panel("t", "d.", [Query("x")], kind=PanelKind.TABLE, columns=[("a", "A")], value_heading="v")
    (_, found) = as_json(Dashboard("u", "t", "d", [Row("r", [table])]))["panels"]
    keep, order = (each["options"] for each in found["transformations"])
    assert keep["include"]["names"] == ["a", "Value"]
    assert order["renameByName"] == {"a": "A", "Value": "v"}
    assert (found["targets"][0]["format"], found["targets"][0]["instant"]) == ("table", True)


def test_one_command_writes_all_files(tmp_path: Path) -> None:
    out = tmp_path / "some/where"
    result = run("--output", str(out), "--prometheus", "http://prom:9090", "--interval", "5", "--p99", "0.2")
    assert result.exit_code == 0, result.output
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == set(files("", ""))
    (source,) = read(out / "provisioning/datasources/daskserve.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prom:9090")
    assert source["jsonData"]["timeInterval"] == "5s"
    (provider,) = read(out / "provisioning/dashboards/daskserve.yaml")["providers"]
    assert provider["options"]["path"] == str(out / "dashboards")
    for each in DASHBOARDS:
        assert json.loads((out / f"dashboards/{each.uid}.json").read_text())["uid"] == each.uid
    assert "> 0.2\n" in (out / "prometheus/rules/daskserve.yaml").read_text()
    assert f"rule_files: [{out}/prometheus/rules/*.yaml]" in result.output
    before = {path: path.read_text() for path in out.rglob("*.*")}
    assert run("--output", str(out), "--dashboards-path", "/var/lib/dash").exit_code == 0
    assert before != {path: path.read_text() for path in out.rglob("*.*")}
    assert "path: /var/lib/dash" in (out / "provisioning/dashboards/daskserve.yaml").read_text()


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "--output"),
        (["--output", "OUT", "--prometheus", "prom:9090"], 2, "such as http://prometheus:9090"),
        (["--output", "OUT", "--error-ratio", "5"], 2, "0<x<=1"),
        (["--output", "OUT", "--p99", "0"], 2, "x>0"),
        (["--output", "OUT/a-file/below"], 1, "Could not write"),
    ],
)
def test_invalid_arguments_are_reported(
    arguments: list[str], status: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a-file").touch()
    result = run(*(each.replace("OUT", str(tmp_path)) for each in arguments))
    assert result.exit_code == status
    assert message in result.output
