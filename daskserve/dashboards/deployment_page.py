"""The dashboard of one deployment: how its replicas share the work."""

from __future__ import annotations

from daskserve.dashboards.overview import (
    SHARES,
    errors_now,
    latencies,
    missing_now,
    p99_now,
    queued_now,
)
from daskserve.dashboards.panels import (
    FIGURE_HEIGHT,
    FIGURE_WIDTH,
    Dashboard,
    Panel,
    PanelKind,
    Query,
    Row,
    Unit,
    figure,
)
from daskserve.dashboards.promql import RUNNING, gauge, mean, quantile, rate, selector

REPLICA = "{{replica}}"

NOW = Row(
    "Now",
    [
        figure(
            "Replicas running",
            "Those that take requests.",
            gauge("deployment_replicas", where=RUNNING),
        ),
        missing_now(),
        figure(
            "Requests/s",
            "Requests that were begun.",
            rate("deployment_requests"),
            Unit.REQUESTS_PER_S,
        ),
        errors_now(
            "Errors",
            "Share of the requests that user code answered with an error.",
            f"{rate('deployment_errors')} / {rate('deployment_requests')}",
        ),
        p99_now("p99", "deployment_request_duration_seconds"),
        figure(
            "Slots taken",
            "Share of the requests that replicas may run at a time which they do run.",
            f"{gauge('replica_ongoing_requests')} / {gauge('replica_max_ongoing_requests')}",
            Unit.RATIO,
            warns_at=0.8,
            alarms_at=1,
        ),
        queued_now("Requests that wait in routers for a replica with room."),
        Panel(
            "Status",
            "What the deployment is now.",
            [Query(gauge("deployment_status", ("status",), how="max"))],
            kind=PanelKind.TABLE,
            width=FIGURE_WIDTH,
            height=FIGURE_HEIGHT,
            columns=[("status", "status")],
        ),
    ],
)

REQUESTS = Row(
    "Requests",
    [
        Panel(
            "Requests/s by replica",
            "Requests that each replica began.",
            [Query(rate("replica_requests", ("replica",)), REPLICA)],
            Unit.REQUESTS_PER_S,
            is_stacked=True,
        ),
        Panel(
            "Errors/s by replica",
            "Requests that user code answered with an error.",
            [Query(rate("replica_errors", ("replica",)), REPLICA)],
            Unit.REQUESTS_PER_S,
            is_stacked=True,
        ),
        Panel(
            "What else became of requests",
            "Given up by callers, ended at their deadline, refused by a full queue or sent again.",
            [
                Query(rate("deployment_cancellations"), "given up"),
                Query(rate("deployment_timeouts"), "timed out"),
                Query(rate("router_rejections"), "refused"),
                Query(rate("deployment_rejections"), "sent back, every slot taken"),
                Query(rate("router_retries", ("cause",)), "sent again, {{cause}}"),
            ],
            Unit.REQUESTS_PER_S,
        ),
        *latencies("Duration", "replica_request_duration_seconds", "replica"),
        Panel(
            "Duration of all",
            "How long requests held their slots, over all replicas.",
            [Query(quantile(share, "deployment_request_duration_seconds"), name) for name, share in SHARES],
            Unit.SECONDS,
        ),
        Panel(
            "Wait in the queue",
            "Of the requests that had to wait for a replica with room.",
            [Query(quantile(share, "router_queue_wait_seconds"), name) for name, share in SHARES],
            Unit.SECONDS,
        ),
        Panel(
            "Queued in routers",
            "By the process whose router holds them: a proxy, or one that calls by handle.",
            [Query(gauge("router_queued_requests", ("instance",)), "{{instance}}")],
            is_stacked=True,
        ),
    ],
)

REPLICAS = Row(
    "Replicas",
    [
        Panel(
            "Ongoing by replica",
            "Requests that hold a slot, beside how many slots one replica has.",
            [
                Query(gauge("replica_ongoing_requests", ("replica",)), REPLICA),
                Query(gauge("replica_max_ongoing_requests", how="max"), "slots of one replica"),
            ],
        ),
        Panel(
            "Queued by replica",
            "Requests in line for a slot, and requests and calls that wait for their batch.",
            [Query(gauge("replica_queued_requests", ("replica",)), REPLICA)],
            is_stacked=True,
        ),
        Panel(
            "Given up but running on",
            "Calls of plain functions that nobody waits for any more; each keeps its slot until it returns.",
            [Query(gauge("replica_abandoned_requests", ("replica",)), REPLICA)],
            warns_at=1,
        ),
        Panel(
            "Batch size",
            "Items in a batch: the mean and the largest ones.",
            [
                Query(mean("batch_size", ("method",)), "{{method}}: mean"),
                Query(quantile(0.99, "batch_size", ("method",)), "{{method}}: p99"),
            ],
        ),
        Panel(
            "Wait for the batch",
            "How long an item waited until its batch began.",
            [
                Query(quantile(0.5, "batch_wait_seconds", ("method",)), "{{method}}: p50"),
                Query(quantile(0.99, "batch_wait_seconds", ("method",)), "{{method}}: p99"),
            ],
            Unit.SECONDS,
        ),
        Panel(
            "Replicas",
            "By state, beside how many are wanted.",
            [
                Query(gauge("deployment_replicas", ("state",)), "{{state}}"),
                Query(gauge("deployment_wanted_replicas"), "wanted"),
            ],
        ),
        Panel(
            "Starts and failures",
            "Replicas that started or failed to, per minute.",
            [
                Query(f"60 * {rate('deployment_replica_starts')}", "started"),
                Query(f"60 * {rate('deployment_replica_start_failures')}", "failed to start"),
            ],
        ),
        Panel(
            "Health",
            "Probes that failed, and times that user code blocked its event loop, per minute.",
            [
                Query(f"60 * {rate('deployment_health_check_failures')}", "failed probes"),
                Query(f"60 * {rate('deployment_loop_blocks')}", "blocked loops"),
            ],
        ),
        Panel(
            "Unhealthy replicas",
            "Those whose last probes failed; they are replaced.",
            [Query(f"sum(1 - daskserve_replica_healthy{selector('replica_healthy')})", "unhealthy")],
            warns_at=1,
        ),
        Panel(
            "Time since the start",
            "A line that falls to nothing is a replica that was started anew.",
            [
                Query(
                    "time() - max by (replica) "
                    f"(daskserve_replica_start_time_seconds{selector('replica_start_time_seconds')})",
                    REPLICA,
                )
            ],
            Unit.SECONDS,
        ),
        Panel(
            "Duration of the start",
            "How long each replica took to start.",
            [Query(gauge("replica_startup_duration_seconds", ("replica",), how="max"), REPLICA)],
            Unit.SECONDS,
        ),
        Panel(
            "Where replicas are",
            "The target and the Dask worker of each.",
            [Query(gauge("replica_healthy", ("replica", "instance", "dask_name"), how="max"))],
            kind=PanelKind.TABLE,
            columns=[("replica", "replica"), ("instance", "target"), ("dask_name", "worker")],
            value_heading="healthy",
        ),
    ],
)

DEPLOYMENT = Dashboard(
    "daskserve-deployment",
    "daskserve: one deployment",
    "How one deployment does, replica by replica.",
    [NOW, REQUESTS, REPLICAS],
    is_for_one_deployment=True,
)
