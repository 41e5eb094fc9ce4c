"""Scraping of a whole cluster like Prometheus, and a real Prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from dask_processes import PATIENCE_S, fetch, poll_for
from distributed import Client
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families

#: Skips tests without Prometheus; Debian's package ``prometheus`` includes promtool.
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed"
)

Series = tuple[str, frozenset[tuple[str, str]]]


def dashboard(dask: Client) -> str:
    """Return the address of the scheduler's HTTP server."""
    return f"http://127.0.0.1:{dask.scheduler_info()['services']['dashboard']}"


def target_urls(dask: Client) -> list[str]:
    """Return the URLs of all targets of a cluster."""
    reply = fetch(f"{dashboard(dask)}/daskserve/targets")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    return [
        f"{each['labels']['__scheme__']}://{address}{each['labels']['__metrics_path__']}"
        for each in reply.json
        for address in each["targets"]
    ]


def scrape(url: str) -> dict[Series, float]:
    """Return the series of daskserve and of user metrics of one target; check that each occurs once."""
    reply = fetch(url)
    assert reply.status == 200
    found: dict[Series, float] = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            if sample.name.startswith(("daskserve_", "my_")):
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in found
                found[key] = sample.value
    return found


class Metrics:
    """The result of a scrape of a whole cluster."""

    def __init__(self, dask: Client) -> None:
        self.by_target = {url: scrape(url) for url in target_urls(dask)}

    def values(self, name: str, **labels: str) -> list[float]:
        """Return the values of all series with these labels, over all targets."""
        return [
            value
            for series in self.by_target.values()
            for (found, pairs), value in series.items()
            if found == name and labels.items() <= dict(pairs).items()
        ]

    def total(self, name: str, **labels: str) -> float:
        return sum(self.values(name, **labels))

    def labels(self, name: str, label: str) -> list[str]:
        """Return the values of a label of a metric, over all series."""
        return [
            dict(pairs)[label]
            for series in self.by_target.values()
            for found, pairs in series
            if found == name
        ]


def assert_monotone(before: Mapping[str, Mapping[Series, float]], after: Metrics) -> None:
    """Fail if a counter of a live process decreased, or disappeared before its replica ended."""
    for url, earlier in before.items():
        now = after.by_target.get(url)
        if now is None:
            continue
        for (name, pairs), value in earlier.items():
            if name.endswith(("_total", "_count", "_bucket", "_sum")) and "replica" not in dict(pairs):
                assert now.get((name, pairs), -1) >= value, (name, dict(pairs))


@contextmanager
def scraping(urls: Sequence[str]) -> Iterator[list[int]]:
    """Scrape continuously during the block; yield the list of response statuses."""
    statuses: list[int] = []
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            for url in urls:
                reply = fetch(url)
                statuses.append(reply.status)
                list(text_string_to_metric_families(reply.text))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        thread.join(PATIENCE_S)


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[Any]:
        """Return the result of an expression; empty while Prometheus starts."""
        try:
            reply = fetch(f"{self.url}/api/v1/query?query={quote(expression)}")
        except OSError:
            return []
        return list(reply.json["data"]["result"]) if reply.status == 200 else []

    def evaluate(self, expression: str) -> list[Any]:
        """Return the result of an expression; fail if the expression is invalid."""
        reply = fetch(f"{self.url}/api/v1/query?query={quote(expression)}")
        assert reply.status == 200, (expression, reply.text)
        return list(reply.json["data"]["result"])

    def wait_for(self, expression: str, count: int) -> list[Any]:
        """Wait until the result of an expression has ``count`` series, and return it."""
        last: list[Any] = []

        def look() -> bool:
            last[:] = self.query(expression)
            return len(last) == count

        poll_for(look, 40, what=lambda: f"{expression}: {json.dumps(last)}", every_s=0.2)
        return last


@contextmanager
def prometheus(configuration: str, folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus on a loopback port with its data in a folder, until the block ends."""
    port = free_port()
    (folder / "prometheus.yml").write_text(configuration)
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
