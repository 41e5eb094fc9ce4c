"""Every panel of the dashboards shows data from a real Prometheus that scrapes a real cluster."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_load import Traffic, deploy, trouble
from dask_processes import ExternalCluster, poll_for
from grafana.dashboards import DASHBOARDS
from grafana.panels import Dashboard
from scraping import Prometheus, dashboard, needs_prometheus, prometheus

import daskserve as serve

#: Events that a test cannot cause, or that are over before the next scrape: an unhealthy replica is replaced
#: at once. These lines have no data, but must exist.
QUIET = (
    "daskserve_control_loop_failures",
    "daskserve_long_poll_fetch_failures",
    "daskserve_channel_dial_failures",
    "1 - daskserve_replica_healthy",
)


def substituted(expression: str, values: dict[str, str]) -> str:
    """Substitute the selected variables, as Grafana does before a query."""
    for name, value in values.items():
        expression = expression.replace(f"${name}", value)
    assert "$" not in expression.replace("${1}", "")
    return expression


def expressions(dashboard: Dashboard, instance: str) -> dict[str, str]:
    """Return ``{panel and legend: expression}``."""
    deployment = "model" if dashboard.is_for_one_deployment else ".*"
    chosen = {
        "job": "daskserve",
        "serve_instance": instance,
        "deployment": deployment,
        "__rate_interval": "4s",
    }

    return {
        f"{dashboard.title}/{panel.title}/{query.legend}": substituted(query.expression, chosen)
        for panel in dashboard.panels()
        for query in panel.queries
    }


def command(*arguments: str) -> str:
    whole = [sys.executable, "-m", "daskserve", "metrics", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, timeout=30, check=True).stdout


@pytest.fixture
def scraped(client: serve.Client, external: ExternalCluster, tmp_path: Path) -> Iterator[Prometheus]:
    """Yield a Prometheus with the alert rules, configured as users do it."""
    command("grafana", "--output", str(tmp_path / "set-up"), "--interval", "1")
    configuration = command("scrape-config", dashboard(external.client), "--interval", "1")
    configuration += (
        f"global: {{evaluation_interval: 1s}}\nrule_files: [{tmp_path}/set-up/prometheus/rules/*]\n"
    )
    with prometheus(configuration, tmp_path) as found:
        yield found


@pytest.mark.nightly
@needs_prometheus
def test_every_panel_has_data_under_load(
    client: serve.Client, external: ExternalCluster, scraped: Prometheus, tmp_path: Path
) -> None:
    deploy(client, tmp_path)
    scraped.wait_for('up{job="daskserve"} == 1', 3)
    wanted: dict[str, str] = {}
    for each in DASHBOARDS:
        wanted |= expressions(each, client.instance_name)
    assert len(wanted) > 90
    largest = dict.fromkeys(wanted, -math.inf)

    def look() -> bool:
        for name in [name for name in wanted if not is_shown(name)]:
            for series in scraped.evaluate(f"max_over_time(({wanted[name]})[1m:1s])"):
                value = float(series["value"][1])
                largest[name] = largest[name] if math.isnan(value) else max(largest[name], value)
        return all(map(is_shown, wanted))

    def is_shown(name: str) -> bool:
        is_quiet = any(word in wanted[name] for word in QUIET)
        return math.isfinite(largest[name]) and (largest[name] > 0 or is_quiet)

    with Traffic(client.http_urls()[0]):
        poll_for(lambda: len(scraped.evaluate("daskserve_http_requests_total")) > 3, every_s=0.2)
        with trouble(client, external, tmp_path):
            poll_for(
                look,
                30,
                what=lambda: {each: largest[each] for each in wanted if not is_shown(each)},
                every_s=0.5,
            )
