"""The dashboard of one deployment, with its metrics by replica."""

from __future__ import annotations

from grafana.overview import (
    SHARES,
    errors_now,
    latencies,
    missing_now,
    p50_and_p99,
    p99_now,
    queued_now,
)
from grafana.panels import (
    STAT_HEIGHT,
    STAT_WIDTH,
    Dashboard,
    Panel,
    PanelKind,
    Query,
    Row,
    Unit,
    stat,
)
from grafana.promql import RUNNING, busy, gauge, mean, quantile, rate, selector

REPLICA = "{{replica}}"

NOW = Row(
    "Now",
    [
        stat(
            "Replicas running",
            "Replicas that accept requests.",
            gauge("deployment_replicas", where=RUNNING),
        ),
        missing_now(),
        stat(
            "Requests/s",
            "Requests that began.",
            rate("deployment_requests"),
            Unit.REQUESTS_PER_S,
        ),
        errors_now(
            "Errors",
            "Share of requests for which user code raised an error.",
            f"{rate('deployment_errors')} / {rate('deployment_requests')}",
        ),
        p99_now("p99", "deployment_request_duration_seconds"),
        stat(
            "Slots taken",
            "Share of the replicas' slots that requests hold.",
            f"{gauge('replica_ongoing_requests')} / {gauge('replica_max_ongoing_requests')}",
            Unit.RATIO,
            warns_at=0.8,
            alarms_at=1,
        ),
        queued_now("Requests waiting in routers for a free slot."),
        Panel(
            "Status",
            "Present status of the deployment.",
            [Query(gauge("deployment_status", ("status",), how="max"))],
            kind=PanelKind.TABLE,
            width=STAT_WIDTH,
            height=STAT_HEIGHT,
            columns=[("status", "status")],
        ),
    ],
)

REQUESTS = Row(
    "Requests",
    [
        Panel(
            "Requests/s by replica",
            "Requests that began, by replica.",
            [Query(rate("replica_requests", ("replica",)), REPLICA)],
            Unit.REQUESTS_PER_S,
            is_stacked=True,
        ),
        Panel(
            "Errors/s by replica",
            "Requests for which user code raised an error.",
            [Query(rate("replica_errors", ("replica",)), REPLICA)],
            Unit.REQUESTS_PER_S,
            is_stacked=True,
        ),
        Panel(
            "Other outcomes of requests",
            "Cancelled by callers, timed out, rejected by a full queue, or retried.",
            [
                Query(rate("deployment_cancellations"), "cancelled"),
                Query(rate("deployment_timeouts"), "timed out"),
                Query(rate("router_rejections"), "rejected"),
                Query(rate("deployment_rejections"), "sent back, every slot taken"),
                Query(rate("router_retries", ("cause",)), "retried, {{cause}}"),
                Query(rate("router_hedges", ("outcome",)), "second attempt, {{outcome}}"),
                Query(rate("router_fallbacks", ("cause",)), "router failed, {{cause}}"),
            ],
            Unit.REQUESTS_PER_S,
        ),
        *latencies("Duration", "replica_request_duration_seconds", "replica"),
        Panel(
            "Duration, all replicas",
            "Time that requests held their slots, over all replicas.",
            [Query(quantile(share, "deployment_request_duration_seconds"), name) for name, share in SHARES],
            Unit.SECONDS,
        ),
        Panel(
            "Wait in the queue",
            "Waiting time of queued requests.",
            [Query(quantile(share, "router_queue_wait_seconds"), name) for name, share in SHARES],
            Unit.SECONDS,
        ),
        Panel(
            "Queued in routers",
            "By process with a router: a proxy, or a caller of handles.",
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
            "Requests that hold a slot, and the number of slots per replica.",
            [
                Query(gauge("replica_ongoing_requests", ("replica",)), REPLICA),
                Query(gauge("replica_max_ongoing_requests", how="max"), "slots of one replica"),
            ],
        ),
        Panel(
            "Slots used by replica",
            "Mean share of its slots that requests held.",
            [
                Query(
                    f"{busy('replica_request_duration_seconds', ('replica',))} / "
                    f"{gauge('replica_max_ongoing_requests', ('replica',))}",
                    REPLICA,
                )
            ],
            Unit.RATIO,
            warns_at=0.8,
        ),
        Panel(
            "Queued by replica",
            "Requests waiting for a slot, and requests and calls waiting for their batch.",
            [Query(gauge("replica_queued_requests", ("replica",)), REPLICA)],
            is_stacked=True,
        ),
        Panel(
            "Cancelled but still running",
            "Cancelled calls of plain functions; each holds its slot until it returns.",
            [Query(gauge("replica_abandoned_requests", ("replica",)), REPLICA)],
            warns_at=1,
        ),
        Panel(
            "Batch size",
            "Items per batch: mean and 99th percentile.",
            [
                Query(mean("batch_size", ("method",)), "{{method}}: mean"),
                Query(quantile(0.99, "batch_size", ("method",)), "{{method}}: p99"),
            ],
        ),
        Panel(
            "Wait for the batch",
            "Time that an item waited for its batch.",
            p50_and_p99("batch_wait_seconds", "method"),
            Unit.SECONDS,
        ),
        Panel(
            "Duration of batches",
            "Time that a batch ran.",
            p50_and_p99("batch_duration_seconds", "method"),
            Unit.SECONDS,
        ),
        Panel(
            "Use of batches",
            "Mean share of max_batch_size that batches had.",
            [Query(mean("batch_utilization_ratio", ("method",)), "{{method}}")],
            Unit.RATIO,
        ),
        Panel(
            "Replicas",
            "Replicas by state, and the target.",
            [
                Query(gauge("deployment_replicas", ("state",)), "{{state}}"),
                Query(gauge("deployment_wanted_replicas"), "wanted"),
            ],
        ),
        Panel(
            "Starts and failures",
            "Replicas that started or failed to start, per minute.",
            [
                Query(f"60 * {rate('deployment_replica_starts')}", "started"),
                Query(f"60 * {rate('deployment_replica_start_failures')}", "failed to start"),
            ],
        ),
        Panel(
            "Health",
            "Failed health checks, and times that user code blocked its event loop, per minute.",
            [
                Query(f"60 * {rate('deployment_health_check_failures')}", "failed checks"),
                Query(f"60 * {rate('deployment_loop_blocks')}", "blocked loops"),
            ],
        ),
        Panel(
            "Unhealthy replicas",
            "Replicas whose last health checks failed; they are replaced.",
            [Query(f"sum(1 - daskserve_replica_healthy{selector('replica_healthy')})", "unhealthy")],
            warns_at=1,
        ),
        Panel(
            "Uptime",
            "Time since each replica started.",
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
            "Start-up time",
            "Time that each replica took to start.",
            [Query(gauge("replica_startup_duration_seconds", ("replica",), how="max"), REPLICA)],
            Unit.SECONDS,
        ),
        Panel(
            "Checks and changes",
            "99th percentile of the time that replicas took for them.",
            [
                Query(quantile(0.99, "deployment_health_check_seconds"), "health check"),
                Query(quantile(0.99, "deployment_reconfigure_seconds"), "change of options"),
                Query(quantile(0.99, "deployment_replica_startup_seconds"), "start"),
                Query(quantile(0.99, "deployment_replica_shutdown_seconds"), "end"),
            ],
            Unit.SECONDS,
        ),
        Panel(
            "Locations of replicas",
            "The scrape target and the Dask worker of each replica.",
            [Query(gauge("replica_healthy", ("replica", "instance", "dask_name"), how="max"))],
            kind=PanelKind.TABLE,
            width=24,
            columns=[("replica", "replica"), ("instance", "target"), ("dask_name", "worker")],
            value_heading="healthy",
        ),
    ],
)

MODELS = Row(
    "Multiplexed models (no data without them)",
    [
        Panel(
            "Models by replica",
            "Models that each replica has loaded.",
            [Query(gauge("replica_multiplexed_models", ("replica",)), REPLICA)],
        ),
        Panel(
            "Loads and unloads of models",
            "Models loaded and unloaded, per minute.",
            [
                Query(f"60 * {rate('multiplexed_model_loads')}", "loads"),
                Query(f"60 * {rate('multiplexed_model_unloads')}", "unloads"),
                Query(f"60 * {rate('multiplexed_model_load_failures')}", "failed loads"),
            ],
        ),
        Panel(
            "Time of loads and unloads",
            "99th percentile.",
            [
                Query(quantile(0.99, "multiplexed_model_load_seconds"), "load"),
                Query(quantile(0.99, "multiplexed_model_unload_seconds"), "unload"),
            ],
            Unit.SECONDS,
        ),
        Panel(
            "Requests that found their model loaded",
            "Share of the requests for a model.",
            [
                Query(
                    f"{rate('multiplexed_model_hits')} / {rate('multiplexed_model_requests')}",
                    "found",
                )
            ],
            Unit.RATIO,
        ),
        Panel(
            "Places of models",
            "The replicas that have each model.",
            [Query(gauge("replica_multiplexed_model", ("model", "replica"), how="max"))],
            kind=PanelKind.TABLE,
            width=16,
            columns=[("model", "model"), ("replica", "replica")],
            value_heading="loaded",
        ),
    ],
)

CONTINUOUS = Row(
    "Continuous batches and payload log (no data without them)",
    [
        Panel(
            "Requests in continuous batches",
            "Requests with a slot, and those that wait for one.",
            [
                Query(gauge("continuous_active_requests", ("method",)), "{{method}}: active"),
                Query(gauge("continuous_queued_requests", ("method",)), "{{method}}: waiting"),
            ],
        ),
        Panel(
            "Cost of what waits",
            "Sum by cost_fn, such as tokens.",
            [Query(gauge("continuous_queued_cost", ("method",)), "{{method}}")],
        ),
        Panel(
            "Steps of continuous batches",
            "Time that a step took.",
            p50_and_p99("continuous_step_duration_seconds", "method"),
            Unit.SECONDS,
        ),
        Panel(
            "Outputs and preemptions",
            "Outputs, such as tokens, and requests that lost their slot for lack of memory.",
            [
                Query(rate("continuous_outputs", ("method",)), "{{method}}: outputs"),
                Query(rate("continuous_preemptions", ("method",)), "{{method}}: preemptions"),
            ],
            Unit.PER_S,
        ),
        Panel(
            "Payload log",
            "Sampled requests that were written, and that were dropped.",
            [
                Query(rate("payload_log_requests"), "written"),
                Query(rate("payload_log_dropped", ("reason",)), "dropped, {{reason}}"),
            ],
            Unit.PER_S,
            width=16,
        ),
    ],
)

DEPLOYMENT = Dashboard(
    "daskserve-deployment",
    "daskserve: one deployment",
    "One deployment, by replica.",
    [NOW, REQUESTS, REPLICAS, MODELS, CONTINUOUS],
    is_for_one_deployment=True,
)
