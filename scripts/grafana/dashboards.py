"""Write dashboards as Grafana's JSON.

grafana-foundation-sdk is not used. It writes the same JSON except for defaults, and would save about 55 of
the 190 lines below. But it adds 4.8 MB and 57 ms of import, and is marked as alpha. Each of its releases is
for one minor version of Grafana, and its names change between releases (`GraphTresholdsStyleMode` in 10.1).
`setup.py` could state no lower bound: pip takes 1769699998!10.1.0 for the newest release, which is for the
oldest Grafana.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.telemetry.table import METRICS
from grafana.deployment_page import DEPLOYMENT
from grafana.overview import OVERVIEW
from grafana.panels import Dashboard, GridPosition, Panel, PanelKind, Query, Row, placed

DASHBOARDS: Sequence[Dashboard] = (OVERVIEW, DEPLOYMENT)
#: The format version of Grafana 10.0. Later versions of Grafana read and upgrade it.
SCHEMA_VERSION = 38
TAG = "daskserve"

#: The variables that a link passes on.
_CHOSEN = "${datasource:queryparam}&${job:queryparam}&${serve_instance:queryparam}"
_DATASOURCE: Mapping[str, str] = {"type": "prometheus", "uid": "${datasource}"}


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard in Grafana's JSON format."""
    panels = [
        {"id": number, **(_row(each, place) if isinstance(each, Row) else _panel(each, place))}
        for number, (each, place) in enumerate(placed(dashboard), start=1)
    ]
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "links": [_link(other) for other in DASHBOARDS if other.uid != dashboard.uid],
        "templating": {"list": _variables(dashboard)},
        "panels": panels,
    }


def _link(other: Dashboard) -> dict[str, Any]:
    """Return a link to another dashboard that passes on the time range and the instance."""
    return {
        "type": "link",
        "title": other.title,
        "url": f"/d/{other.uid}?{_CHOSEN}",
        "icon": "dashboard",
        "tooltip": other.description,
        "asDropdown": False,
        "includeVars": False,
        "keepTime": True,
        "tags": [],
        "targetBlank": False,
    }


# ---- variables


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    wanted = METRICS["deployment_wanted_replicas"].exported_name
    chosen = 'job=~"$job",serve_instance=~"$serve_instance"'
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "hide": 0,
        },
        _query_variable("job", "Job", f"label_values({METRICS['build_info'].exported_name}, job)"),
        _query_variable(
            "serve_instance", "Instance", f'label_values({wanted}{{job=~"$job"}}, serve_instance)'
        ),
        _query_variable(
            "deployment",
            "Deployment",
            f"label_values({wanted}{{{chosen}}}, deployment)",
            is_single=dashboard.is_for_one_deployment,
        ),
    ]


def _query_variable(name: str, label: str, query: str, *, is_single: bool = False) -> dict[str, Any]:
    everything = {"text": ["All"], "value": ["$__all"], "selected": True}
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": dict(_DATASOURCE),
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "hide": 0,
        "multi": not is_single,
        "includeAll": not is_single,
        **({} if is_single else {"allValue": ".*", "current": everything}),
    }


# ---- panels


def _row(row: Row, place: GridPosition) -> dict[str, Any]:
    return {"type": "row", "title": row.title, "collapsed": False, "gridPos": _grid(place), "panels": []}


def _panel(panel: Panel, place: GridPosition) -> dict[str, Any]:
    found = {
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": dict(_DATASOURCE),
        "gridPos": _grid(place),
        "targets": [_target(panel, query, chr(ord("A") + i)) for i, query in enumerate(panel.queries)],
        "fieldConfig": _field_config(panel),
        "options": _options(panel),
    }
    if panel.kind is PanelKind.TABLE:
        found["transformations"] = _columns(panel)
    return found


def _grid(place: GridPosition) -> dict[str, int]:
    return {"x": place.x, "y": place.y, "w": place.width, "h": place.height}


def _target(panel: Panel, query: Query, ref_id: str) -> dict[str, Any]:
    is_table = panel.kind is PanelKind.TABLE
    formats = {PanelKind.TABLE: "table", PanelKind.HEATMAP: "heatmap"}
    return {
        "refId": ref_id,
        "datasource": dict(_DATASOURCE),
        "expr": query.expression,
        "legendFormat": query.legend or "__auto",
        "format": formats.get(panel.kind, "time_series"),
        "instant": is_table,
        "range": not is_table,
        "editorMode": "code",
    }


def _field_config(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    for value, colour in ((panel.warns_at, "yellow"), (panel.alarms_at, "red")):
        if value is not None:
            steps.append({"color": colour, "value": value})
    defaults: dict[str, Any] = {
        "unit": panel.unit.value,
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": [],
    }
    if panel.kind is PanelKind.TIME_SERIES:
        defaults |= {"min": 0, "color": {"mode": "palette-classic"}, "custom": _lines(panel, len(steps) > 1)}
        if any("{{deployment}}" in query.legend for query in panel.queries):
            defaults["links"] = [_link_of_a_series()]
    elif panel.kind is PanelKind.STAT:
        defaults["color"] = {"mode": "thresholds"}
    return {"defaults": defaults, "overrides": []}


def _link_of_a_series() -> dict[str, Any]:
    """Return a link from a deployment's series to its own dashboard, with the same time range."""
    chosen = f"var-deployment=${{__field.labels.deployment}}&{_CHOSEN}&${{__url_time_range}}"
    return {
        "title": "${__field.labels.deployment}, by replica",
        "url": f"/d/{DEPLOYMENT.uid}?{chosen}",
    }


def _lines(panel: Panel, has_thresholds: bool) -> dict[str, Any]:
    return {
        "drawStyle": "line",
        "lineInterpolation": "linear",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.is_stacked else 0,
        "showPoints": "never",
        "spanNulls": False,
        "axisPlacement": "auto",
        "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if has_thresholds else "off"},
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind is PanelKind.STAT:
        return {
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    if panel.kind is PanelKind.TABLE:
        return {"showHeader": True, "cellHeight": "sm"}
    if panel.kind is PanelKind.HEATMAP:
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {
                "mode": "scheme",
                "scheme": "Oranges",
                "fill": "dark-orange",
                "exponent": 0.5,
                "steps": 64,
                "reverse": False,
            },
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "showValue": "never",
            "tooltip": {"show": True, "yHistogram": False},
            "yAxis": {"axisPlacement": "left", "unit": panel.unit.value},
        }
    return {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _columns(panel: Panel) -> list[dict[str, Any]]:
    """Return the transformations that select, order and rename a table's columns."""
    headings = dict(panel.columns)
    if panel.value_heading:
        headings["Value"] = panel.value_heading
    order = {name: number for number, name in enumerate(headings)}
    return [
        {"id": "filterFieldsByName", "options": {"include": {"names": list(headings)}}},
        {
            "id": "organize",
            "options": {"excludeByName": {}, "indexByName": order, "renameByName": headings},
        },
    ]
