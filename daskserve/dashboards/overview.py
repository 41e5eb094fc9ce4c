"""The dashboard of a whole instance: what comes in, what goes wrong, who carries it."""

from __future__ import annotations

from collections.abc import Sequence

from daskserve.dashboards.panels import Dashboard, Panel, PanelKind, Query, Row, Unit, figure
from daskserve.dashboards.promql import RUNNING, SERVER_ERRORS, buckets, gauge, quantile, rate, selector

SHARES: Sequence[tuple[str, float]] = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def _status_classes() -> str:
    by_code = rate("http_requests", ("code",))
    return f'sum by (class) (label_replace({by_code}, "class", "${{1}}xx", "code", "(.).*"))'


def _with_no_route(expression: str) -> str:
    """Name the series of the requests for which there was no route, which would have no name at all."""
    return f'label_replace({expression}, "route", "(no route)", "route", "")'


def latencies(what: str, short_name: str, by: str) -> list[Panel]:
    """Return three panels: how long it took one half, nine tenths and 99 of 100, by a label."""
    return [
        Panel(
            f"{what}: {name} by {by}",
            f"{share:.0%} took no longer than this.",
            [Query(_quantile(share, short_name, by), f"{{{{{by}}}}}")],
            Unit.SECONDS,
        )
        for name, share in SHARES
    ]


def _quantile(share: float, short_name: str, by: str) -> str:
    found = quantile(share, short_name, (by,))
    return _with_no_route(found) if by == "route" else found


def errors_now(title: str, description: str, share: str) -> Panel:
    """Return a panel with a share of requests that failed."""
    return figure(title, description, share, Unit.RATIO, warns_at=0.01, alarms_at=0.05)


def p99_now(title: str, short_name: str) -> Panel:
    """Return a panel with how long the slowest of requests take."""
    return figure(
        title,
        "99% of the requests took no longer than this.",
        quantile(0.99, short_name),
        Unit.SECONDS,
        warns_at=0.5,
        alarms_at=1,
    )


def queued_now(description: str) -> Panel:
    """Return a panel with how many requests wait in routers."""
    return figure("Queued", description, gauge("router_queued_requests"), warns_at=100, alarms_at=1000)


def missing_now() -> Panel:
    """Return a panel with how many replicas are missing."""
    return figure(
        "Replicas missing",
        "Replicas that are to run and do not.",
        f"{gauge('deployment_wanted_replicas')} - {gauge('deployment_replicas', where=RUNNING)}",
        warns_at=1,
    )


NOW = Row(
    "Now",
    [
        figure(
            "HTTP requests/s",
            "Requests that ended, whatever became of them.",
            rate("http_requests"),
            Unit.REQUESTS_PER_S,
        ),
        errors_now(
            "HTTP errors",
            "Share of the requests that were answered with 5xx.",
            f"({rate('http_requests', where=SERVER_ERRORS)} or vector(0)) / {rate('http_requests')}",
        ),
        p99_now("HTTP p99", "http_request_duration_seconds"),
        figure("Ongoing", "Requests that replicas work on.", gauge("router_ongoing_requests")),
        queued_now("Requests that wait for a replica with room."),
        missing_now(),
        figure(
            "Proxies running",
            "Processes that listen for HTTP.",
            gauge("proxy_status", where='status="RUNNING"'),
        ),
        figure(
            "Goals pending",
            "Changes that were asked for and are still coming about.",
            gauge("goals_pending"),
        ),
    ],
)

REQUESTS = Row(
    "Requests",
    [
        Panel(
            "HTTP requests/s by route",
            "Requests that ended. Those for which there was no route have none.",
            [Query(_with_no_route(rate("http_requests", ("route",))), "{{route}}")],
            Unit.REQUESTS_PER_S,
            is_stacked=True,
        ),
        Panel(
            "HTTP answers by status",
            "2xx are answers, 4xx the caller's fault (499: it left), 5xx ours or that of user code.",
            [Query(_status_classes(), "{{class}}")],
            Unit.REQUESTS_PER_S,
            is_stacked=True,
        ),
        Panel(
            "Errors by cause",
            "What failed in daskserve, of HTTP requests and of calls by handle; and what user code raised.",
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
            "Requests that replicas began, over HTTP and by handle.",
            [Query(rate("deployment_requests", ("deployment",)), "{{deployment}}")],
            Unit.REQUESTS_PER_S,
            is_stacked=True,
        ),
        Panel(
            "Error ratio by deployment",
            "Share of the requests that user code answered with an error.",
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
            "How many requests took how long.",
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
            "Requests that replicas work on, as their routers know it.",
            [Query(gauge("router_ongoing_requests", ("deployment",)), "{{deployment}}")],
            is_stacked=True,
        ),
        Panel(
            "Queued by deployment",
            "Requests that wait in routers for a replica with room.",
            [Query(gauge("router_queued_requests", ("deployment",)), "{{deployment}}")],
            is_stacked=True,
        ),
        Panel(
            "Wait in the queue: p99",
            "Of the requests that had to wait at all.",
            [Query(quantile(0.99, "router_queue_wait_seconds", ("deployment",)), "{{deployment}}")],
            Unit.SECONDS,
        ),
        Panel(
            "Refused and repeated",
            "Requests that a full queue refused, and those sent again because the replica was busy or lost.",
            [
                Query(rate("router_rejections", ("deployment",)), "refused: {{deployment}}"),
                Query(rate("router_retries", ("deployment", "cause")), "again: {{deployment}}, {{cause}}"),
            ],
            Unit.REQUESTS_PER_S,
        ),
        Panel(
            "Timed out and given up",
            "HTTP requests that met their deadline, and those whose client left; the same seen by replicas.",
            [
                Query(rate("http_timeouts"), "HTTP: timed out"),
                Query(rate("http_cancellations"), "HTTP: client left"),
                Query(rate("deployment_timeouts"), "replicas: timed out"),
                Query(rate("deployment_cancellations"), "replicas: given up"),
            ],
            Unit.REQUESTS_PER_S,
        ),
        Panel(
            "Calls by handle",
            "Calls that processes of the cluster began.",
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
            "Replicas running and wanted",
            "Where the line of those wanted is above, replicas start or find no place.",
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
            "The reason of its last decision; N stands for a number.",
            [Query(gauge("autoscaling_reason", ("deployment", "reason"), how="max"))],
            kind=PanelKind.TABLE,
            columns=[("deployment", "deployment"), ("reason", "reason")],
        ),
        Panel(
            "Replicas by state",
            "Those that stay in STARTING wait for a place or for their code.",
            [Query(gauge("deployment_replicas", ("state",)), "{{state}}")],
            is_stacked=True,
        ),
        Panel(
            "Starts and failures",
            "Replicas that started or failed to, and health probes that failed, per minute.",
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
                    "{{deployment}}: failed probe",
                ),
            ],
        ),
        Panel(
            "Deployments",
            "What each of them is now.",
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
            "How many of them are in which state.",
            [Query(gauge("proxy_status", ("status",)), "{{status}}")],
            is_stacked=True,
        ),
        Panel(
            "Goals",
            "Changes that were asked for: pending, and those that ended, per minute.",
            [
                Query(gauge("goals_pending"), "pending"),
                Query(f"60 * {rate('goals', ('outcome',))}", "{{outcome}} per minute"),
            ],
        ),
        Panel(
            "Dask workers",
            "Those that can hold replicas, that are being retired, and that do not answer.",
            [Query(gauge("workers", ("state",)), "{{state}}")],
            is_stacked=True,
        ),
        Panel(
            "Control loop",
            "How long a round of the controller's loop takes.",
            [
                Query(quantile(0.5, "control_loop_duration_seconds"), "p50"),
                Query(quantile(0.99, "control_loop_duration_seconds"), "p99"),
            ],
            Unit.SECONDS,
        ),
        Panel(
            "Rounds of the control loop",
            "Rounds, and steps of theirs that failed and are tried again.",
            [
                Query(rate("control_loop_duration_seconds"), "rounds"),
                Query(rate("control_loop_failures"), "failed steps"),
            ],
            Unit.PER_S,
        ),
        Panel(
            "News from the controller: delay",
            "From a change to its use in the processes that listen.",
            [
                Query(quantile(0.5, "long_poll_delay_seconds"), "p50"),
                Query(quantile(0.99, "long_poll_delay_seconds"), "p99"),
            ],
            Unit.SECONDS,
        ),
        Panel(
            "News from the controller: fetches",
            "Listeners fetch what was published, and try again where that fails.",
            [
                Query(rate("long_poll_fetches"), "fetched"),
                Query(rate("long_poll_fetch_failures"), "failed"),
            ],
            Unit.PER_S,
        ),
        Panel(
            "Controllers started",
            "One, unless a controller was lost and replaced.",
            [Query(gauge("supervisor_controller_starts", ("serve_instance",)), "{{serve_instance}}")],
        ),
        Panel(
            "Alerts",
            "Rules of daskserve that fire, or will do so if it lasts.",
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
            "What processes send each other of requests and answers.",
            [
                Query(rate("channel_sent_bytes"), "sent"),
                Query(rate("channel_received_bytes"), "received"),
            ],
            Unit.BYTES_PER_S,
        ),
        Panel(
            "Channels: trouble",
            "Channels that were opened because the last one broke, and those that could not be, per minute.",
            [
                Query(f"60 * {rate('channel_reconnects', ('instance',))}", "{{instance}}: opened again"),
                Query(f"60 * {rate('channel_dial_failures', ('instance',))}", "{{instance}}: not opened"),
            ],
        ),
        Panel(
            "Channels",
            "Connections between processes, counted at both of their ends.",
            [Query(gauge("channels", ("instance",)), "{{instance}}")],
            is_stacked=True,
        ),
        Panel(
            "Event loops that were blocked",
            "Times per minute that async user code held up its event loop for more than 100 ms.",
            [Query(f"60 * {rate('deployment_loop_blocks', ('deployment',))}", "{{deployment}}")],
            warns_at=1,
        ),
        Panel(
            "CPU",
            "Cores that each process uses; 1 is a whole one.",
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
            "What each process holds of the machine's memory.",
            [Query('sum by (instance) (process_resident_memory_bytes{job=~"$job"})', "{{instance}}")],
            Unit.BYTES,
            is_stacked=True,
        ),
    ],
)

OVERVIEW = Dashboard(
    "daskserve-overview",
    "daskserve: overview",
    "Everything that instances of daskserve do on a Dask cluster.",
    [NOW, REQUESTS, LOAD, REPLICAS, CONTROL, PROCESSES],
)
