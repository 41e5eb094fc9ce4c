"""``daskserve metrics``: configure Prometheus to scrape daskserve, and list the metrics."""

from __future__ import annotations

import http.client
import json
import os
import signal
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click
import dask.config

from daskserve.cli.metrics.grafana import grafana, interval_option
from daskserve.cli.output import CommandError, ExitCode, FiniteRange, json_option, print_json, writing
from daskserve.common.formatting import shown
from daskserve.errors import NotRunningError, ServeError
from daskserve.telemetry.table import SECTIONS

#: Timeout of requests to the scheduler.
TIMEOUT_S = 10.0
#: Path of the list of targets on the scheduler's HTTP server.
TARGETS_PATH = "/daskserve/targets"

CONFIGURATION = """\
# For prometheus.yml.
scrape_configs:
  - job_name: daskserve
    scrape_interval: {interval_s}s
    {discovery}
"""
HTTP_DISCOVERY = """\
http_sd_configs:
      - url: {url}
        refresh_interval: {interval_s}s"""
FILE_DISCOVERY = """\
file_sd_configs:
      - files: [{file}]"""

#: Recording rules that add the metric names of the classic system.
CLASSIC_RULES = """\
groups:
  - name: classic-names
    rules:
      - record: serve_num_http_requests
        expr: sum by (route) (daskserve_http_requests_total)
      - record: serve_num_router_requests
        expr: sum by (deployment) (daskserve_router_requests_total)
      - record: serve_handle_request_counter
        expr: sum by (endpoint) (daskserve_handle_requests_total)
      - record: serve_deployment_request_counter
        expr: sum by (deployment, replica) (daskserve_replica_requests_total)
      - record: serve_backend_request_counter
        expr: >-
          sum by (backend) (label_replace(
          daskserve_deployment_requests_total, "backend", "$1", "deployment", "(.*)"))
      - record: serve_backend_error_counter
        expr: >-
          sum by (backend) (label_replace(
          daskserve_deployment_errors_total, "backend", "$1", "deployment", "(.*)"))
      - record: serve_deployment_queued_queries
        expr: sum by (deployment) (daskserve_router_queued_requests)
      - record: serve_replica_processing_queries
        expr: sum by (deployment, replica) (daskserve_replica_ongoing_requests)
"""


@click.group()
def metrics() -> None:
    """Set up Prometheus and Grafana for daskserve."""


metrics.add_command(grafana)


@metrics.command("list")
@json_option
def list_metrics(as_json: bool) -> None:
    """Print all metrics with their labels, kinds and meanings."""
    if as_json:
        print_json(
            [
                {
                    "name": each.exported_name,
                    "section": title,
                    "labels": list(each.exported_labels) if each.labels else [],
                    "kind": each.kind.value,
                    "meaning": each.meaning,
                }
                for title, specs in SECTIONS.items()
                for each in specs
            ]
        )
        return
    for title, specs in SECTIONS.items():
        click.echo(f"{title}:")
        for spec in specs:
            labels = f"{{{', '.join(spec.exported_labels)}}}" if spec.labels else ""
            click.echo(f"  {spec.exported_name}{labels}  {spec.kind.value}\n      {spec.meaning}")


@metrics.command()
def rules() -> None:
    """Print recording rules that add the metric names of the classic system."""
    click.echo(CLASSIC_RULES, nl=False)


@metrics.command("scrape-config")
@click.argument("scheduler", default="")
@click.option("--file", "file", type=click.Path(dir_okay=False), help="Read targets from this file instead.")
@interval_option
def scrape_config(scheduler: str, file: str | None, interval_s: int) -> None:
    """Print the section of prometheus.yml that scrapes a whole cluster.

    SCHEDULER is the address of the scheduler's dashboard, such as http://scheduler:8787. With --file,
    Prometheus reads the targets from a file that `daskserve metrics targets --file ... --follow` keeps up to
    date.
    """
    if file is not None:
        discovery = FILE_DISCOVERY.format(file=json.dumps(os.path.abspath(file)))
    elif scheduler.startswith(("http://", "https://")):
        discovery = HTTP_DISCOVERY.format(url=json.dumps(_url(scheduler)), interval_s=interval_s)
    else:
        raise click.UsageError(
            f"The scheduler's dashboard is {scheduler!r}; give an address such as http://scheduler:8787, or "
            "--file."
        )
    click.echo(CONFIGURATION.format(discovery=discovery, interval_s=interval_s), nl=False)


@metrics.command()
@click.argument("scheduler", default="")
@click.option("--file", "file", type=click.Path(dir_okay=False, path_type=Path), help="File to write to.")
@click.option("--follow", is_flag=True, help="Keep updating the file until interrupted.")
@click.option(
    "--interval",
    "interval_s",
    type=FiniteRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds between two updates.",
)
def targets(scheduler: str, file: Path | None, follow: bool, interval_s: float) -> None:
    """Print the scrape targets, or keep a file of them (file_sd) up to date.

    SCHEDULER is the address of the scheduler's dashboard, such as http://scheduler:8787, or of the scheduler
    itself, such as tcp://scheduler:8786. The default is Dask's scheduler-address. The file is replaced
    atomically, and does not change while the scheduler does not answer.
    """
    address = scheduler or str(dask.config.get("scheduler-address", None) or "")
    if not address:
        raise click.UsageError(
            "Give the scheduler's address, or set scheduler-address in Dask's configuration."
        )
    if follow and file is None:
        raise click.UsageError("--follow is given without --file; add --file.")
    if follow and file is not None:
        _follow(address, file, interval_s)
    elif file is None:
        click.echo(_fetch(address), nl=False)
    else:
        text = _fetch(address)
        with writing(file):
            replace(file, text)


def _follow(address: str, file: Path, interval_s: float) -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    written = reported = ""
    while True:
        try:
            text = _fetch(address)
            if text != written or not file.exists():
                replace(file, text)
                written = text
            reported = ""
        except (click.ClickException, OSError) as error:
            problem = error.format_message() if isinstance(error, click.ClickException) else str(error)
            if problem != reported:  # report a lasting problem once
                click.echo(f"Trying again every {shown(interval_s)} s: {problem}", err=True)
            reported = problem
        if ended.wait(min(interval_s, threading.TIMEOUT_MAX)):
            return


def replace(file: Path, text: str) -> None:
    """Replace a file atomically: readers see either the old or the new content."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        os.chmod(name, 0o644)  # Prometheus usually runs as another user
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _fetch(address: str) -> str:
    """Return the list of targets as JSON, sorted, so that equal lists give equal text."""
    try:
        found = _targets(address)
    except (ServeError, OSError, ValueError, http.client.HTTPException) as error:
        # A server that answers something else runs, but is not a Dask dashboard.
        is_wrong = isinstance(error, (ValueError, http.client.HTTPException, urllib.error.HTTPError))
        code = ExitCode.FAILED if is_wrong else ExitCode.NOT_RUNNING
        raise CommandError(f"{address} did not return a list of targets: {error}", code) from error
    found.sort(key=lambda each: (each["labels"].get("dask_role", ""), each["targets"]))
    return json.dumps(found, indent=2) + "\n"


def _targets(address: str) -> list[dict[str, Any]]:
    if not address.startswith(("http://", "https://")):
        # Imported here because it imports all of Dask, which the HTTP path does not need.
        from daskserve.cluster.scheduler.http.discovery import ask_targets

        return ask_targets(address, TIMEOUT_S)
    try:
        with urllib.request.urlopen(_url(address), timeout=TIMEOUT_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            raise NotRunningError("no instance of daskserve runs there; start one") from None
        raise
    if not isinstance(found, list) or not all(map(_is_target, found)):
        raise ValueError("the response is not a list of targets; give the address of a Dask dashboard")
    return found


def _is_target(each: object) -> bool:
    return isinstance(each, dict) and isinstance(each.get("labels"), dict) and "targets" in each


def _url(dashboard: str) -> str:
    base = dashboard.rstrip("/").removesuffix("/status")
    return base if base.endswith(TARGETS_PATH) else base + TARGETS_PATH
