"""The files that configure Grafana and Prometheus.

Dashboards and alert rules are data beside this module. `scripts/grafana` has the definitions of the
dashboards, from which `scripts/write_dashboards.py` generates their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from daskserve.common.formatting import as_whole

HERE = Path(__file__).parent
#: Alert rules fire above this share of failed requests, or this 99th percentile of durations.
ERROR_RATIO, P99_S = 0.05, 1.0


def files(
    prometheus_url: str,
    dashboards_path: str,
    scrape_interval_s: int = 15,
    error_ratio: float = ERROR_RATIO,
    p99_s: float = P99_S,
) -> dict[str, str]:
    """Return all files for Grafana and Prometheus as ``{path: text}``.

    Parameters
    ----------
    prometheus_url : str
        Address at which Grafana reaches Prometheus.
    dashboards_path : str
        Folder of the dashboards' files on Grafana's host.
    scrape_interval_s : int
        Prometheus' scrape interval; Grafana computes rates over at least four intervals.
    error_ratio, p99_s : float
        Thresholds of the alert rules.
    """
    datasource = {
        "name": "daskserve",
        "type": "prometheus",
        "uid": "daskserve-prometheus",
        "access": "proxy",
        "url": prometheus_url,
        "jsonData": {"httpMethod": "POST", "timeInterval": f"{scrape_interval_s}s"},
    }
    provider = {
        "name": "daskserve",
        "folder": "daskserve",
        "type": "file",
        "updateIntervalSeconds": 30,
        "allowUiUpdates": True,
        "options": {"path": dashboards_path},
    }
    dashboards = {f"dashboards/{path.name}": path.read_text("utf-8") for path in HERE.glob("*.json")}
    return {
        "provisioning/datasources/daskserve.yaml": _yaml({"apiVersion": 1, "datasources": [datasource]}),
        "provisioning/dashboards/daskserve.yaml": _yaml({"apiVersion": 1, "providers": [provider]}),
        **dict(sorted(dashboards.items())),
        "prometheus/rules/daskserve.yaml": rules(error_ratio, p99_s),
    }


def rules(error_ratio: float = ERROR_RATIO, p99_s: float = P99_S) -> str:
    """Return the alert rules as YAML, for `rule_files` of prometheus.yml."""
    text = (HERE / "alerts.yaml").read_text("utf-8")
    for name, limit in (("@error_ratio@", error_ratio), ("@p99_s@", p99_s)):
        text = text.replace(name, str(as_whole(limit) or limit))
    return text


def _yaml(content: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(content, sort_keys=False)
    return text
