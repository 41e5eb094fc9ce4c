"""The dashboard of a whole instance: requests, errors, load, replicas and processes."""

from __future__ import annotations

from collections.abc import Sequence

from grafana.panels import Dashboard, Panel, PanelKind, Query, Row, Unit, stat
from grafana.promql import RUNNING, SERVER_ERRORS, buckets, gauge, quantile, rate, selector

SHARES: Sequence[tuple[str, float]] = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def _status_classes() -> str:
    by_code = rate("http_requests", ("code",))
    return f'sum by (class) (label_replace({by_code}, "class", "${{1}}xx", "code", "(.).*"))'


def _with_no_route(expression: str) -> str:
    """Name the series of requests that matched no route, whose label is empty."""
    return f'label_replace({expression}, "route", "(no route)", "route", "")'


def latencies(what: str, short_name: str, by: str) -> list[Panel]:
    """Return panels with the 50th, 90th and 99th percentile of durations, by a label."""
    return [
        Panel(
            f"{what}: {name} by {by}",
            f"{share:.0%} of requests take at most this long.",
            [Query(_quantile(share, short_name, by), f"{{{{{by}}}}}")],
            Unit.SECONDS,
        )
        for name, share in SHARES
    ]


def _quantile(share: float, short_name: str, by: str) -> str:
    found = quantile(share, short_name, (by,))
    return _with_no_route(found) if by == "route" else found


def p50_and_p99(short_name: str, by: str = "") -> list[Query]:
    """Return the queries for the 50th and the 99th percentile of a histogram, by a label if one is given."""
    prefix = f"{{{{{by}}}}}: " if by else ""
    labels = (by,) if by else ()
    return [
        Query(quantile(0.5, short_name, labels), f"{prefix}p50"),
        Query(quantile(0.99, short_name, labels), f"{prefix}p99"),
    ]


def errors_now(title: str, description: str, share: str) -> Panel:
    """Return a panel with the share of failed requests."""
    return stat(title, description, share, Unit.RATIO, warns_at=0.01, alarms_at=0.05)


def p99_now(title: str, short_name: str) -> Panel:
    """Return a panel with the 99th percentile of durations."""
    return stat(
        title,
        "99% of requests take at most this long.",
        quantile(0.99, short_name),
        Unit.SECONDS,
        warns_at=0.5,
        alarms_at=1,
    )


def queued_now(description: str) -> Panel:
    """Return a panel with the number of requests queued in routers."""
    return stat("Queued", description, gauge("router_queued_requests"), warns_at=100, alarms_at=1000)


def missing_now() -> Panel:
    """Return a panel with the number of missing replicas."""
    return stat(
        "Replicas missing",
        "Target number of replicas minus running ones.",
        f"{gauge('deployment_wanted_replicas')} - {gauge('deployment_replicas', where=RUNNING)}",
        warns_at=1,
    )


NOW = Row(
    "Now",
    [
        stat(
            "HTTP requests/s",
            "Requests that ended, with any status.",
            rate("http_requests"),
            Unit.REQUESTS_PER_S,
        ),
        errors_now(
            "HTTP errors",
            "Share of requests with a 5xx response.",
            f"({rate('http_requests', where=SERVER_ERRORS)} or vector(0)) / {rate('http_requests')}",
        ),
        p99_now("HTTP p99", "http_request_duration_seconds"),
        stat("Ongoing", "Requests in flight at replicas.", gauge("router_ongoing_requests")),
        queued_now("Requests waiting for a free slot."),
        missing_now(),
        stat(
            "Proxies running",
            "Proxies that listen for HTTP.",
            gauge("proxy_status", where='status="RUNNING"'),
        ),
        stat(
            "Goals pending",
            "Requested changes that are in progress.",
            gauge("goals_pending"),
        ),
    ],
)

REQUESTS = Row(
    "Requests",
    [
        Panel(
            "HTTP requests/s by route",
            "Requests that ended; '(no route)' if no route matched.",
            [Query(_with_no_route(rate("http_requests", ("route",))), "{{route}}")],
            Unit.REQUESTS_PER_S,
            is_stacked=True,
        ),
        Panel(
            "HTTP responses by status",
            "2xx: success; 4xx: client errors (499: client disconnected); 5xx: server or user code errors.",
            [Query(_status_classes(), "{{class}}")],
            Unit.REQUESTS_PER_S,
            is_stacked=True,
        ),
        Panel(
            "Errors by cause",
            "Failed HTTP requests and handle calls by cause, and errors of user code.",
            [
                Query(rate("http_errors", ("cause",)), "HTTP: {{cause}}"),
                Query(rate("handle_errors", ("cause",)), "handle: {{cause}}"),
                Query(rate("deployment_errors", ("deployment",)), "user code: {{deployment}}"),
            ],
            Unit.REQUESTS_PER_S,
        ),
        *latencies("HTTP", "http_request_duration_seconds", "route"),
        *latencies("Deployments", "deployment_request_duration_seconds", "deployment"),
        Panel(
            "Requests/s by deployment",
            "Requests that began at replicas, over HTTP and through handles.",
            [Query(rate("deployment_requests", ("deployment",)), "{{deployment}}")],
            Unit.REQUESTS_PER_S,
            is_stacked=True,
        ),
        Panel(
            "Error ratio by deployment",
            "Share of requests for which user code raised an error.",
            [
                Query(
                    f"{rate('deployment_errors', ('deployment',))}"
                    f" / {rate('deployment_requests', ('deployment',))}",
                    "{{deployment}}",
                )
            ],
            Unit.RATIO,
            warns_at=0.01,
            alarms_at=0.05,
        ),
        Panel(
            "HTTP durations",
            "Distribution of request durations.",
            [Query(buckets("http_request_duration_seconds", function="increase"), "{{le}}")],
            Unit.SECONDS,
            PanelKind.HEATMAP,
        ),
    ],
)

LOAD = Row(
    "Load",
    [
        Panel(
            "Ongoing by deployment",
            "Requests in flight at replicas, as counted by routers.",
            [Query(gauge("router_ongoing_requests", ("deployment",)), "{{deployment}}")],
            is_stacked=True,
        ),
        Panel(
            "Queued by deployment",
            "Requests waiting in routers for a free slot.",
            [Query(gauge("router_queued_requests", ("deployment",)), "{{deployment}}")],
            is_stacked=True,
        ),
        Panel(
            "Wait in the queue: p99",
            "Waiting time of queued requests.",
            [Query(quantile(0.99, "router_queue_wait_seconds", ("deployment",)), "{{deployment}}")],
            Unit.SECONDS,
        ),
        Panel(
            "Rejected and retried",
            "Requests rejected by a full queue, and requests retried because a replica was busy or lost.",
            [
                Query(rate("router_rejections", ("deployment",)), "rejected: {{deployment}}"),
                Query(rate("router_retries", ("deployment", "cause")), "retried: {{deployment}}, {{cause}}"),
            ],
            Unit.REQUESTS_PER_S,
        ),
        Panel(
            "Timed out and cancelled",
            "HTTP requests that timed out or whose client disconnected; the same for replicas.",
            [
                Query(rate("http_timeouts"), "HTTP: timed out"),
                Query(rate("http_cancellations"), "HTTP: disconnected"),
                Query(rate("deployment_timeouts"), "replicas: timed out"),
                Query(rate("deployment_cancellations"), "replicas: cancelled"),
            ],
            Unit.REQUESTS_PER_S,
        ),
        Panel(
            "Handle calls",
            "Handle calls that began in processes of the cluster.",
            [Query(rate("handle_requests", ("endpoint",)), "{{endpoint}}")],
            Unit.REQUESTS_PER_S,
        ),
    ],
)

_RUNNING = f"daskserve_deployment_replicas{selector('deployment_replicas', RUNNING)}"
_AUTOSCALED = f"daskserve_autoscaling_wanted_replicas{selector('autoscaling_wanted_replicas')}"

REPLICAS = Row(
    "Replicas",
    [
        Panel(
            "Replicas: running and target",
            "If the target is higher, replicas are starting or cannot be placed.",
            [
                Query(gauge("deployment_replicas", ("deployment",), RUNNING), "{{deployment}}"),
                Query(gauge("deployment_wanted_replicas", ("deployment",)), "{{deployment}}, wanted"),
            ],
        ),
        Panel(
            "Autoscaler: wanted and running",
            "Deployments with an autoscaling_config only.",
            [
                Query(gauge("autoscaling_wanted_replicas", ("deployment",)), "{{deployment}}, wanted"),
                Query(
                    f"sum by (deployment) ({_RUNNING} and on (serve_instance, deployment) {_AUTOSCALED})",
                    "{{deployment}}",
                ),
            ],
        ),
        Panel(
            "Autoscaler: why",
            "Reason of the last decision; N stands for a number.",
            [Query(gauge("autoscaling_reason", ("deployment", "reason"), how="max"))],
            kind=PanelKind.TABLE,
            columns=[("deployment", "deployment"), ("reason", "reason")],
        ),
        Panel(
            "Replicas by state",
            "Replicas that stay in STARTING wait for a worker or for their constructor.",
            [Query(gauge("deployment_replicas", ("state",)), "{{state}}")],
            is_stacked=True,
        ),
        Panel(
            "Starts and failures",
            "Replicas that started or failed to start, and failed health checks, per minute.",
            [
                Query(
                    f"60 * {rate('deployment_replica_starts', ('deployment',))}", "{{deployment}}: started"
                ),
                Query(
                    f"60 * {rate('deployment_replica_start_failures', ('deployment',))}",
                    "{{deployment}}: failed to start",
                ),
                Query(
                    f"60 * {rate('deployment_health_check_failures', ('deployment',))}",
                    "{{deployment}}: failed check",
                ),
            ],
        ),
        Panel(
            "Deployments",
            "Present status of each deployment.",
            [Query(gauge("deployment_status", ("deployment", "status"), how="max"))],
            kind=PanelKind.TABLE,
            columns=[("deployment", "deployment"), ("status", "status")],
        ),
    ],
)

CONTROL = Row(
    "Proxies and controller",
    [
        Panel(
            "Proxies",
            "Proxies by state.",
            [Query(gauge("proxy_status", ("status",)), "{{status}}")],
            is_stacked=True,
        ),
        Panel(
            "Goals",
            "Requested changes: in progress, and ended per minute.",
            [
                Query(gauge("goals_pending"), "pending"),
                Query(f"60 * {rate('goals', ('outcome',))}", "{{outcome}} per minute"),
            ],
        ),
        Panel(
            "Dask workers",
            "Workers that can hold replicas, are being retired, or do not answer.",
            [Query(gauge("workers", ("state",)), "{{state}}")],
            is_stacked=True,
        ),
        Panel(
            "Control loop",
            "Time per round of the controller's loop.",
            p50_and_p99("control_loop_duration_seconds"),
            Unit.SECONDS,
        ),
        Panel(
            "Rounds of the control loop",
            "Rounds per second, and failed steps, which are retried.",
            [
                Query(rate("control_loop_duration_seconds"), "rounds"),
                Query(rate("control_loop_failures"), "failed steps"),
            ],
            Unit.PER_S,
        ),
        Panel(
            "Controller updates: delay",
            "Time from a change to its use in listening processes.",
            p50_and_p99("long_poll_delay_seconds"),
            Unit.SECONDS,
        ),
        Panel(
            "Controller updates: fetches",
            "Fetches of published values, and failed fetches, which are retried.",
            [
                Query(rate("long_poll_fetches"), "fetched"),
                Query(rate("long_poll_fetch_failures"), "failed"),
            ],
            Unit.PER_S,
        ),
        Panel(
            "Controllers started",
            "1, unless a controller was lost and replaced.",
            [Query(gauge("supervisor_controller_starts", ("serve_instance",)), "{{serve_instance}}")],
        ),
        Panel(
            "Alerts",
            "Alerts of daskserve that are firing or pending.",
            [Query('ALERTS{alertname=~"Daskserve.*"}')],
            kind=PanelKind.TABLE,
            columns=[
                ("alertname", "alert"),
                ("alertstate", "state"),
                ("deployment", "deployment"),
                ("endpoint", "endpoint"),
                ("instance", "target"),
            ],
        ),
    ],
)

PROCESSES = Row(
    "Processes",
    [
        Panel(
            "Channels: bytes",
            "Bytes of requests and responses between processes.",
            [
                Query(rate("channel_sent_bytes"), "sent"),
                Query(rate("channel_received_bytes"), "received"),
            ],
            Unit.BYTES_PER_S,
        ),
        Panel(
            "Channels: failures",
            "Reopened channels, and channels that failed to open, per minute.",
            [
                Query(f"60 * {rate('channel_reconnects', ('instance',))}", "{{instance}}: reopened"),
                Query(f"60 * {rate('channel_dial_failures', ('instance',))}", "{{instance}}: failed"),
            ],
        ),
        Panel(
            "Channels",
            "Connections between processes, counted at both ends.",
            [Query(gauge("channels", ("instance",)), "{{instance}}")],
            is_stacked=True,
        ),
        Panel(
            "Blocked event loops",
            "Times per minute that async user code blocked its event loop for more than 100 ms.",
            [Query(f"60 * {rate('deployment_loop_blocks', ('deployment',))}", "{{deployment}}")],
            warns_at=1,
        ),
        Panel(
            "CPU",
            "CPU cores used by each process.",
            [
                Query(
                    'sum by (instance) (rate(process_cpu_seconds_total{job=~"$job"}[$__rate_interval]))',
                    "{{instance}}",
                )
            ],
            is_stacked=True,
        ),
        Panel(
            "Memory",
            "Resident memory of each process.",
            [Query('sum by (instance) (process_resident_memory_bytes{job=~"$job"})', "{{instance}}")],
            Unit.BYTES,
            is_stacked=True,
        ),
    ],
)

OVERVIEW = Dashboard(
    "daskserve-overview",
    "daskserve: overview",
    "All instances of daskserve on a Dask cluster.",
    [NOW, REQUESTS, LOAD, REPLICAS, CONTROL, PROCESSES],
)
