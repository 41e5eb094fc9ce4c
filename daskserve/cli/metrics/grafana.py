"""``daskserve metrics grafana``: write the configuration files for Grafana and Prometheus."""

from __future__ import annotations

import os
from pathlib import Path

import click

from daskserve.cli.output import FiniteRange, writing
from daskserve.dashboards.files import ERROR_RATIO, P99_S, files

USE = """\
Grafana: copy provisioning/ into its provisioning folder (usually /etc/grafana/provisioning), then restart it.
Grafana needs read access to {dashboards}.
Prometheus: add "rule_files: [{rules}/*.yaml]" to prometheus.yml, then reload it.
"""


#: How often Prometheus scrapes.
interval_option = click.option(
    "--interval",
    "interval_s",
    type=click.IntRange(1),
    default=15,
    show_default=True,
    help="Seconds between two scrapes.",
)


@click.command()
@click.option(
    "--output",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write to; existing files are replaced.",
)
@click.option(
    "--prometheus",
    "prometheus_url",
    default="http://localhost:9090",
    show_default=True,
    help="Address at which Grafana reaches Prometheus.",
)
@click.option(
    "--dashboards-path",
    help="Folder in which Grafana finds the dashboards, if not in the output folder.",
)
@interval_option
@click.option(
    "--error-ratio",
    type=FiniteRange(0, 1, min_open=True),
    default=ERROR_RATIO,
    show_default=True,
    help="Share of failed requests above which an alert fires.",
)
@click.option(
    "--p99",
    "p99_s",
    type=FiniteRange(0, min_open=True),
    default=P99_S,
    show_default=True,
    help="99th percentile of an endpoint's request durations above which an alert fires, in seconds.",
)
def grafana(
    output: Path,
    prometheus_url: str,
    dashboards_path: str | None,
    interval_s: int,
    error_ratio: float,
    p99_s: float,
) -> None:
    """Write dashboards for Grafana and alert rules for Prometheus.

    Grafana reads the files when it starts (provisioning): a data source, a folder, and its dashboards.
    """
    if not prometheus_url.startswith(("http://", "https://")):
        raise click.UsageError(
            f"--prometheus is {prometheus_url!r}; give an address such as http://prometheus:9090."
        )
    root = Path(os.path.abspath(output))
    where = dashboards_path or str(root / "dashboards")
    for name, text in files(prometheus_url, where, interval_s, error_ratio, p99_s).items():
        file = root / name
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        click.echo(str(file))
    click.echo(USE.format(dashboards=where, rules=root / "prometheus/rules"), nl=False)
