"""The collector of a process: sums, kept totals, and validation with Prometheus' own tools."""

from __future__ import annotations

import gc
import logging
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from daskserve.telemetry.collector import (
    MAX_ENDED,
    MAX_FOLDED,
    SWEEP_EVERY,
    ProcessMetrics,
    plain_sample,
    sample_of,
)
from daskserve.telemetry.histogram import HistogramCounts, LatencyHistogram
from daskserve.telemetry.table import METRICS, SECTIONS, MetricKind, MetricSample
from daskserve.telemetry.user import UserMetric, UserSample

pytestmark = pytest.mark.smoke


class Metrics:
    """A source with scripted samples."""

    def __init__(self, *samples: MetricSample) -> None:
        self.said = list(samples)
        self.users: list[UserSample] = []

    def samples(self) -> list[MetricSample]:
        return list(self.said)

    def user_samples(self) -> list[UserSample]:
        return list(self.users)


class Scraped:
    """A separate registry with a collector."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.process = ProcessMetrics(self.registry)

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def lines(self) -> list[str]:
        found = [line for line in self.text().splitlines() if not line.startswith("#")]
        return [line for line in found if "build_info" not in line]


@pytest.fixture
def scraped() -> Scraped:
    return Scraped()


REQUESTS = ("deployment_requests", ("i", "d"))
ONGOING = ("replica_ongoing_requests", ("i", "d", "d#1"))


def test_the_collector_is_registered_only_while_it_has_sources(scraped: Scraped) -> None:
    assert scraped.text() == ""
    source = Metrics((*REQUESTS, 3))
    for _ in range(2):
        scraped.process.add(source)
        assert scraped.lines() == [
            'daskserve_deployment_requests_total{application="default",deployment="d",serve_instance="i"} 3.0'
        ]
        scraped.process.remove(source)
        assert scraped.text() == ""


def test_samples_become_series_under_their_own_names(scraped: Scraped) -> None:
    source = Metrics((*REQUESTS, 3), (*ONGOING, 2))
    scraped.process.add(source)
    assert (
        'daskserve_deployment_requests_total{application="default",deployment="d",serve_instance="i"} 3.0'
        in scraped.lines()
    )
    assert (
        'daskserve_replica_ongoing_requests{application="default",deployment="d",replica="d#1",'
        'serve_instance="i"} 2.0' in scraped.lines()
    )
    assert "# TYPE daskserve_deployment_requests_total counter" in scraped.text()


def test_a_histogram_is_cumulative_and_ends_with_infinity(scraped: Scraped) -> None:
    latency = LatencyHistogram()
    for seconds in (0.00005, 0.0002, 100.0):
        latency.observe(seconds)
    source = Metrics(("handle_request_duration_seconds", ("i", "e"), latency))
    scraped.process.add(source)
    counts = {
        match[1]: float(match[2])
        for match in re.finditer(r'_bucket\{.*le="([^"]+)".*\} (\S+)', scraped.text())
    }
    assert (counts["0.0001"], counts["0.00025"], counts["60.0"], counts["+Inf"]) == (1, 2, 2, 3)
    (count,) = [line for line in scraped.lines() if "duration_seconds_count" in line]
    assert count.endswith('{application="default",endpoint="e",serve_instance="i"} 3.0')


def test_counts_of_several_workers_in_one_process_are_summed(scraped: Scraped) -> None:
    latency = LatencyHistogram()
    latency.observe(1)
    one = Metrics((*REQUESTS, 3), ("handle_request_duration_seconds", ("i", "e"), latency))
    two = Metrics((*REQUESTS, 4), ("handle_request_duration_seconds", ("i", "e"), latency))
    scraped.process.add(one)
    scraped.process.add(two)
    scraped.process.add(two)
    assert (
        'daskserve_deployment_requests_total{application="default",deployment="d",serve_instance="i"} 7.0'
        in scraped.lines()
    )
    assert any("duration_seconds_count" in line and line.endswith(" 2.0") for line in scraped.lines())
    assert latency.count == 1


def test_totals_stay_when_a_source_is_removed_and_series_of_its_replica_end(scraped: Scraped) -> None:
    latency = LatencyHistogram()
    latency.observe(1)
    other = Metrics()
    source = Metrics(
        (*REQUESTS, 3), (*ONGOING, 2), ("deployment_request_duration_seconds", ("i", "d"), latency)
    )
    scraped.process.add(other)
    scraped.process.add(source)
    scraped.process.remove(source)
    scraped.process.remove(source)
    source.said = [(*REQUESTS, 1000)]
    assert "replica=" not in scraped.text()
    assert (
        'daskserve_deployment_requests_total{application="default",deployment="d",serve_instance="i"} 3.0'
        in scraped.lines()
    )
    assert any("duration_seconds_count" in line and line.endswith(" 1.0") for line in scraped.lines())
    again = Metrics((*REQUESTS, 2))
    scraped.process.add(again)
    assert (
        'daskserve_deployment_requests_total{application="default",deployment="d",serve_instance="i"} 5.0'
        in scraped.lines()
    )


def test_the_totals_of_an_instance_end_with_it(scraped: Scraped) -> None:
    staying, one, two = Metrics(), Metrics((*REQUESTS, 3)), Metrics(("deployment_requests", ("j", "d"), 1))
    for source in (staying, one, two):
        scraped.process.add(source)
    scraped.process.remove(one)
    scraped.process.remove(two)
    scraped.process.forget("i")
    assert scraped.lines() == [
        'daskserve_deployment_requests_total{application="default",deployment="d",serve_instance="j"} 1.0'
    ]


def test_the_number_of_kept_totals_is_bounded(scraped: Scraped) -> None:
    staying = Metrics(*(("deployment_requests", ("i", f"d{n}"), 0) for n in range(MAX_FOLDED + 100)))
    scraped.process.add(staying)
    for start in range(0, MAX_FOLDED + 100, 100):
        source = Metrics(*(("deployment_requests", ("i", f"d{n}"), 1) for n in range(start, start + 100)))
        scraped.process.add(source)
        scraped.process.remove(source)
    assert sum(line.endswith(" 1.0") for line in scraped.lines()) == MAX_FOLDED


def test_totals_of_deployments_without_replicas_are_dropped_first(scraped: Scraped) -> None:
    """Otherwise the counters of other deployments would fall, and Prometheus would count them again."""
    earlier, present = Metrics((*REQUESTS, 3)), Metrics((*REQUESTS, 1))
    scraped.process.add(earlier)
    scraped.process.add(present)
    scraped.process.remove(earlier)
    for number in range(2 * MAX_ENDED):
        gone = Metrics(("deployment_requests", ("i", f"gone{number}"), 1))
        scraped.process.add(gone)
        scraped.process.remove(gone)
    assert len(scraped.lines()) <= MAX_ENDED + SWEEP_EVERY + 1
    assert 'deployment="gone0"' not in scraped.text()
    assert any(line.endswith(" 4.0") for line in scraped.lines())


def test_the_collector_keeps_no_source_alive(scraped: Scraped) -> None:
    source = Metrics((*REQUESTS, 3))
    scraped.process.add(source)
    del source
    gc.collect()
    assert scraped.lines() == []


class Broken(Metrics):
    """A source that raises at every scrape."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception = RuntimeError("half torn down")

    def samples(self) -> list[MetricSample]:
        raise self.error

    def user_samples(self) -> list[UserSample]:
        raise self.error


def test_a_broken_source_affects_no_other_and_is_logged_once(
    scraped: Scraped, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Broken(), Metrics((*REQUESTS, 3))
    scraped.process.add(broken)
    scraped.process.add(sound)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert len(scraped.lines()) == 1
            assert len(scraped.process.samples()) == 1
        assert len(caplog.records) == 2, "its metrics, and those of user code"
        broken.error = KeyError("samples")
        assert len(scraped.lines()) == 1
        assert len(caplog.records) == 4
        scraped.process.remove(broken)
    assert len(caplog.records) == 4


def test_scrapes_in_other_threads_never_see_a_counter_decrease(scraped: Scraped) -> None:
    staying = Metrics()
    scraped.process.add(staying)
    seen: list[float] = []
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.is_set():
            seen.append(sum(float(line.rpartition(" ")[2]) for line in scraped.lines()))

    thread = threading.Thread(target=scrape)
    thread.start()
    for _ in range(300):
        source = Metrics((*REQUESTS, 1))
        scraped.process.add(source)
        source.said = [(*REQUESTS, 2)]
        scraped.process.remove(source)
    is_over.set()
    thread.join()
    assert seen == sorted(seen)
    assert (
        'daskserve_deployment_requests_total{application="default",deployment="d",serve_instance="i"} 600.0'
        in scraped.lines()
    )


def test_samples_cross_processes_as_plain_values() -> None:
    sizes = METRICS["batch_size"].histogram()
    sizes.observe(3)
    for sample in ((*REQUESTS, 3), ("batch_size", ("i", "d", "m"), sizes)):
        name, labels, value = sample_of(plain_sample(sample))
        assert (name, labels) == sample[:2]
        if isinstance(value, HistogramCounts):
            assert (value.counts, value.sum, value.bounds) == (sizes.counts, 3, sizes.bounds)
        else:
            assert value == 3


def test_a_user_metric_is_exported_per_replica_unless_its_kind_differs(
    scraped: Scraped,
) -> None:
    hits = UserMetric("hits", MetricKind.COUNTER, "Hits.", ("model",))
    own = (("serve_instance", "i"), ("deployment", "d"))
    one, two = Metrics(), Metrics()
    one.users = [UserSample(hits, (*own, ("replica", "d#1"), ("model", "a")), 2)]
    two.users = [
        UserSample(hits, (*own, ("replica", "d#2"), ("model", "\udce9")), 3),
        UserSample(UserMetric("hits", MetricKind.GAUGE), own, 1),
    ]
    scraped.process.add(one)
    scraped.process.add(two)
    place = 'application="default",deployment="d"'
    assert scraped.lines() == [
        f'hits_total{{{place},model="a",replica="d#1",serve_instance="i"}} 2.0',
        f'hits_total{{{place},model="\\\\udce9",replica="d#2",serve_instance="i"}} 3.0',
    ]


def test_the_application_follows_from_the_tag(scraped: Scraped) -> None:
    """The label `deployment` keeps the whole tag, so that earlier queries keep their meaning."""
    source = Metrics(
        ("deployment_requests", ("i", "shop/model"), 1),
        ("http_requests", ("i", "/shop", "shop/front", "GET", "200"), 2),
        ("http_requests", ("i", "", "", "GET", "404"), 3),
    )
    scraped.process.add(source)
    assert sorted(scraped.lines()) == [
        'daskserve_deployment_requests_total{application="shop",deployment="shop/model",'
        'serve_instance="i"} 1.0',
        'daskserve_http_requests_total{application="",code="404",endpoint="",method="GET",route="",'
        'serve_instance="i"} 3.0',
        'daskserve_http_requests_total{application="shop",code="200",endpoint="shop/front",method="GET",'
        'route="/shop",serve_instance="i"} 2.0',
    ]


# ---- names


def test_names_and_labels_follow_prometheus_rules() -> None:
    for spec in METRICS.values():
        assert re.fullmatch(r"daskserve(_[a-z]+)+", spec.name)
        assert not spec.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms"))
        assert not {"instance", "job", "le"} & set(spec.labels)
        assert spec.meaning.endswith(".")
    assert len(METRICS) == sum(len(section) for section in SECTIONS.values())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Debian's prometheus")
def test_promtool_accepts_all_metrics(scraped: Scraped, tmp_path: Path) -> None:
    samples: list[MetricSample] = []
    for name, spec in METRICS.items():
        value = spec.histogram() if spec.kind is MetricKind.HISTOGRAM else 1.0
        samples.append((name, tuple("x" for _ in spec.labels), value))
    source = Metrics(*samples)
    scraped.process.add(source)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=scraped.text(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
