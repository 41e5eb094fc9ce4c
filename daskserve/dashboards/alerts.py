"""Alert rules for Prometheus.

The rules fire on lasting conditions. No rule uses the rate of a counter that first appears when the event
happens, because Prometheus sees no increase in the first value of a series.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import yaml

from daskserve.dashboards.promql import RUNNING, SERVER_ERRORS, gauge, quantile, rate

GROUP = "daskserve"
#: The job name in the output of `daskserve metrics scrape-config`.
JOB = "daskserve"


class Severity(Enum):
    """How urgent an alert is."""

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class AlertThresholds:
    """The thresholds that differ most between services."""

    error_ratio: float = 0.05
    p99_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule, which fires once the expression has had a value for the time ``lasts``."""

    name: str
    expression: str
    lasts: str
    severity: Severity
    summary: str
    description: str

    @property
    def when(self) -> str:
        """A human-readable meaning of the rule: its summary without labels."""
        return re.sub(r"\s*\{\{.*?\}\}", "", self.summary)


_D = ("serve_instance", "deployment")
_I = ("serve_instance",)
_E = ("serve_instance", "endpoint")


def _gauge(short_name: str, by: Sequence[str], where: str = "", how: str = "sum") -> str:
    return gauge(short_name, by, where, how=how, filters=False)


def _rate(short_name: str, by: Sequence[str], where: str = "", window: str = "5m") -> str:
    return rate(short_name, by, where, window=window, filters=False)


def _increase(short_name: str, by: Sequence[str], window: str) -> str:
    return rate(short_name, by, window=window, filters=False, function="increase")


def alerts(limits: AlertThresholds | None = None) -> list[Alert]:
    """Return all rules."""
    chosen = limits or AlertThresholds()
    return [*_of_requests(chosen), *_of_replicas(), *_of_the_instance(), *_of_stores(), *_of_processes()]


def _of_requests(limits: AlertThresholds) -> list[Alert]:
    ratio, p99 = f"{limits.error_ratio:g}", f"{limits.p99_s:g}"
    return [
        Alert(
            "DaskserveErrorRatio",
            f"{_rate('deployment_errors', _D)} / {_rate('deployment_requests', _D)} > {ratio}",
            "5m",
            Severity.WARNING,
            "User code of {{ $labels.deployment }} raises errors for many requests",
            f"{{{{ $value | humanizePercentage }}}} of its requests failed within 5 minutes, more than "
            f"{ratio}. The "
            "tracebacks are in the logs of its workers.",
        ),
        Alert(
            "DaskserveHttpErrorRatio",
            f"{_rate('http_requests', _E, SERVER_ERRORS)} / {_rate('http_requests', _E)} > {ratio}",
            "5m",
            Severity.CRITICAL,
            "Endpoint {{ $labels.endpoint }} answers many HTTP requests with 5xx",
            f"{{{{ $value | humanizePercentage }}}} of its requests within 5 minutes, more than {ratio}. "
            "daskserve_http_errors_total shows the causes.",
        ),
        Alert(
            "DaskserveLatency",
            f"{quantile(0.99, 'http_request_duration_seconds', _E, window='5m', filters=False)} > {p99}",
            "10m",
            Severity.WARNING,
            "Endpoint {{ $labels.endpoint }} is slow",
            f"99% of its HTTP requests take up to {{{{ $value | humanizeDuration }}}}, more than {p99} s.",
        ),
        Alert(
            "DaskserveRequestsRefused",
            f"{_rate('router_rejections', _D)} / {_rate('router_requests', _D)} > 0.01",
            "2m",
            Severity.CRITICAL,
            "Requests to {{ $labels.deployment }} are rejected because its queue is full",
            "{{ $value | humanizePercentage }} of them were answered with 503 within 5 minutes. The "
            "deployment needs more or faster replicas.",
        ),
        Alert(
            "DaskserveRequestsTimeOut",
            f"{_rate('deployment_timeouts', _D)} / {_rate('deployment_requests', _D)} > 0.05",
            "5m",
            Severity.WARNING,
            "Requests to {{ $labels.deployment }} time out",
            "{{ $value | humanizePercentage }} of them reached their deadline within 5 minutes.",
        ),
        Alert(
            "DaskserveSlotsLost",
            f"{_gauge('replica_abandoned_requests', _D)} / {_gauge('replica_max_ongoing_requests', _D)} > "
            "0.5",
            "5m",
            Severity.WARNING,
            "Cancelled calls hold slots of {{ $labels.deployment }}",
            "{{ $value | humanizePercentage }} of its slots are held by plain functions that still run "
            "after their calls were cancelled. Add a time limit to the functions, or make them async.",
        ),
    ]


def _of_replicas() -> list[Alert]:
    wanted = _gauge("deployment_wanted_replicas", _D)
    running = _gauge("deployment_replicas", _D, RUNNING)
    # Counted from scraped series, because the counters of a worker that dies are lost with it.
    started = (
        f"count by ({', '.join(_D)}) "
        "(last_over_time(daskserve_replica_start_time_seconds[15m]) > time() - 900)"
    )
    most_wanted = f"max by ({', '.join(_D)}) (max_over_time(daskserve_deployment_wanted_replicas[15m]))"
    return [
        Alert(
            "DaskserveDeploymentDown",
            f"{running} == 0 and {wanted} > 0",
            "1m",
            Severity.CRITICAL,
            "No replica of {{ $labels.deployment }} runs",
            "{{ $value }} replicas run, so requests wait or fail. `serve.status()` shows why none starts.",
        ),
        Alert(
            "DaskserveReplicasMissing",
            f"{wanted} - {running} > 0",
            "10m",
            Severity.WARNING,
            "Fewer replicas of {{ $labels.deployment }} run than its target",
            "{{ $value }} are missing. They cannot be placed or do not start; `serve.status()` shows why.",
        ),
        Alert(
            "DaskserveReplicasRestart",
            f"{started} > 2 * {most_wanted}",
            "1m",
            Severity.WARNING,
            "Replicas of {{ $labels.deployment }} restart repeatedly",
            "{{ $value }} have started within 15 minutes, more than twice the target.",
        ),
        Alert(
            "DaskserveReplicasDoNotStart",
            f"{_increase('deployment_replica_start_failures', _D, '10m')} > 2",
            "1m",
            Severity.WARNING,
            "Replicas of {{ $labels.deployment }} fail to start",
            "About {{ $value | humanize }} of them failed within 10 minutes. `serve.status()` has the "
            "traceback.",
        ),
        Alert(
            "DaskserveHealthProbesFail",
            f"{_increase('deployment_health_check_failures', _D, '10m')} > 5",
            "1m",
            Severity.WARNING,
            "Replicas of {{ $labels.deployment }} fail health checks",
            "About {{ $value | humanize }} health checks failed within 10 minutes.",
        ),
    ]


def _of_the_instance() -> list[Alert]:
    return [
        Alert(
            "DaskserveProxyDown",
            "max by (serve_instance, proxy, status) "
            '(daskserve_proxy_status{status!~"RUNNING|DRAINING"}) == 1',
            "2m",
            Severity.CRITICAL,
            "Proxy {{ $labels.proxy }} does not listen",
            "It is in the state {{ $labels.status }} ({{ $value }}). Its port may be in use, or its host "
            "may be gone.",
        ),
        Alert(
            "DaskserveGoalsStuck",
            f"{_gauge('goals_pending', _I)} > 0",
            "15m",
            Severity.WARNING,
            "Changes of {{ $labels.serve_instance }} do not complete",
            "{{ $value }} are pending. `serve.status()` shows what they wait for.",
        ),
        Alert(
            "DaskserveControllerAbsent",
            f"{_gauge('supervisor_controller_starts', _I)} unless {_gauge('controller_epoch', _I)}",
            "1m",
            Severity.CRITICAL,
            "The controller of {{ $labels.serve_instance }} is gone",
            "Replicas still serve requests, but failed ones are not replaced. {{ $value }} controllers were "
            "started so far.",
        ),
        Alert(
            "DaskserveControlLoopStopped",
            f"{_rate('control_loop_duration_seconds', _I)} == 0",
            "2m",
            Severity.CRITICAL,
            "The control loop of {{ $labels.serve_instance }} has stopped",
            "{{ $value }} rounds of the loop within 5 minutes; there should be one every 5 s.",
        ),
        Alert(
            "DaskserveControlLoopSlow",
            f"{quantile(0.99, 'control_loop_duration_seconds', _I, window='5m', filters=False)} > 1",
            "10m",
            Severity.WARNING,
            "The controller of {{ $labels.serve_instance }} is slow",
            "The 99th percentile of its rounds is {{ $value | humanizeDuration }}.",
        ),
        Alert(
            "DaskserveControlLoopFails",
            f"60 * {_rate('control_loop_failures', _I)} > 1",
            "5m",
            Severity.WARNING,
            "Steps of the controller of {{ $labels.serve_instance }} fail",
            "{{ $value | humanize }} fail per minute and are retried. The log of its worker shows why.",
        ),
    ]


def _of_stores() -> list[Alert]:
    return [
        Alert(
            "DaskserveStoreTaken",
            f"{_gauge('store_owned', _I)} == 0",
            "2m",
            Severity.WARNING,
            "Another cluster has the store of {{ $labels.serve_instance }}",
            "The gauge is {{ $value }}: the instance serves on and replaces what dies, but accepts no "
            "changes. Shut it down if the one on the other cluster serves.",
        ),
    ]


def _of_processes() -> list[Alert]:
    return [
        Alert(
            "DaskserveEventLoopBlocked",
            f"60 * {_rate('deployment_loop_blocks', _D)} > 1",
            "5m",
            Severity.WARNING,
            "Code of {{ $labels.deployment }} blocks its event loop",
            "{{ $value | humanize }} times per minute, for more than 100 ms each; other requests wait "
            "meanwhile. The logs of its workers show the line of code.",
        ),
        Alert(
            "DaskserveTargetDown",
            f'up{{job="{JOB}"}} == 0',
            "2m",
            Severity.WARNING,
            "Process {{ $labels.instance }} cannot be scraped",
            "up is {{ $value }}: the process is gone or hangs, or Prometheus cannot reach it.",
        ),
        Alert(
            "DaskserveNoTargets",
            f'absent(up{{job="{JOB}"}})',
            "5m",
            Severity.CRITICAL,
            "Prometheus has no daskserve targets",
            "{{ $value }}: service discovery finds none. Check that the scheduler and an instance run.",
        ),
        Alert(
            "DaskserveWorkersRefused",
            "max by (job, instance) (daskserve_supervisor_refused_workers) > 0",
            "5m",
            Severity.WARNING,
            "Dask workers have no compatible daskserve",
            "{{ $value }} workers cannot hold replicas, because they have another version of daskserve or "
            "none.",
        ),
    ]


def rules(limits: AlertThresholds | None = None) -> str:
    """Return the rules as YAML, for `rule_files` of prometheus.yml."""
    found = [
        {
            "alert": each.name,
            "expr": each.expression,
            "for": each.lasts,
            "labels": {"severity": each.severity.value},
            "annotations": {"summary": each.summary, "description": each.description},
        }
        for each in alerts(limits)
    ]
    text: str = yaml.safe_dump({"groups": [{"name": GROUP, "rules": found}]}, sort_keys=False, width=100)
    return text
