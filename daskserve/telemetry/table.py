"""The definition of every metric that daskserve exports: name, kind, labels and meaning.

The documentation is generated from it. Names and units follow https://prometheus.io/docs/practices/naming/:
base units, and ``_total`` on counters. Each label has few values, regardless of what clients send.
``serve_instance`` is the name of the daskserve instance (``instance`` is Prometheus' own label, the scraped
address), and ``deployment`` is the backend's tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from daskserve.telemetry.histogram import (
    LIFE_BUCKETS_S,
    SHARE_BUCKETS,
    SIZE_BUCKETS,
    HistogramCounts,
    LatencyHistogram,
)


class MetricKind(Enum):
    """The kinds of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


#: One value of one metric: the name, the label values in order, and the value.
MetricSample = tuple[str, tuple[str, ...], float | HistogramCounts]


class Source(Protocol):
    """An object with metrics. Any thread may call it, even while it starts or stops."""

    def samples(self) -> Iterable[MetricSample]:
        """Return the current values without blocking; histograms may still be written to."""


#: Labels of short-lived objects. Their series end with the object, and no totals are kept.
SHORT_LIVED = frozenset({"replica", "proxy"})
#: The label of the application, which is derived from the tag of a deployment or from an endpoint's name.
APPLICATION = "application"
APPLICATION_OF = frozenset({"deployment", "endpoint"})


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. ``short_name`` has no ``daskserve_`` and, for a counter, no ``_total``."""

    short_name: str
    kind: MetricKind
    labels: tuple[str, ...]
    meaning: str
    #: The buckets of a histogram; None means the buckets for durations, `latency_buckets_s`.
    bounds: Sequence[float] | None = None

    def histogram(self) -> HistogramCounts:
        """Return an empty histogram with its buckets."""
        return LatencyHistogram() if self.bounds is None else HistogramCounts(self.bounds)

    @property
    def name(self) -> str:
        """The full name, without the suffix of counters."""
        return f"daskserve_{self.short_name}"

    @property
    def exported_name(self) -> str:
        """The name that queries use."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name

    @property
    def exported_labels(self) -> tuple[str, ...]:
        """The labels of the metric's series, including the application."""
        return (*self.labels, APPLICATION) if APPLICATION_OF & set(self.labels) else self.labels

    @property
    def is_folded(self) -> bool:
        """Whether the process keeps the total after the source is removed."""
        return self.kind is not MetricKind.GAUGE and not SHORT_LIVED & set(self.labels)


_I = ("serve_instance",)
_D = (*_I, "deployment")
_E = (*_I, "endpoint")
_R = (*_D, "replica")
_H = (*_I, "route", "endpoint")
_C, _G, _T = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

#: Metrics by section of the documentation.
SECTIONS: Mapping[str, Sequence[MetricSpec]] = {
    "HTTP, in each process with a proxy": (
        MetricSpec("http_requests", _C, (*_H, "method", "code"), "HTTP requests that have ended."),
        MetricSpec("http_errors", _C, (*_H, "cause"), "Requests that failed in daskserve, by cause."),
        MetricSpec("http_request_duration_seconds", _T, _H, "Seconds from a request's head to its end."),
        MetricSpec("http_ongoing_requests", _G, _I, "Requests in flight."),
        MetricSpec("http_timeouts", _C, _I, "Requests that reached their deadline."),
        MetricSpec(
            "http_cancellations", _C, _I, "Requests whose client disconnected before the response started."
        ),
        MetricSpec("http_connections", _G, _I, "Open connections, WebSockets included."),
        MetricSpec(
            "http_evicted_connections",
            _C,
            _I,
            "Idle connections closed at max_connections, or without file descriptors.",
        ),
        MetricSpec("http_accept_pauses", _C, (*_I, "cause"), "Pauses in accepting connections."),
        MetricSpec(
            "http_limited_requests",
            _C,
            (*_I, "limit"),
            "Requests, WebSockets and connections that a limit ended or held up.",
        ),
        MetricSpec(
            "http_buffered_bytes",
            _G,
            (*_I, "direction"),
            "Bytes of received bodies and messages, and of unsent responses, that the proxy holds.",
        ),
    ),
    "Traces, in each process that makes spans": (
        MetricSpec("trace_spans", _C, _I, "Spans that have ended."),
        MetricSpec("trace_spans_exported", _C, _I, "Spans that an exporter has delivered."),
        MetricSpec("trace_spans_failed", _C, _I, "Spans that an exporter could not deliver."),
        MetricSpec("trace_spans_dropped", _C, _I, "Spans dropped because too many waited for the exporter."),
    ),
    "Calls through handles, in each process that makes them": (
        MetricSpec("handle_requests", _C, _E, "Calls that began."),
        MetricSpec("handle_errors", _C, (*_E, "cause"), "Calls that raised, by cause."),
        MetricSpec("handle_request_duration_seconds", _T, _E, "Seconds from a call to its result."),
        MetricSpec(
            "handle_arguments_wait_seconds",
            _T,
            _E,
            "Seconds that a call waited for responses and Dask values among its arguments.",
        ),
    ),
    "Routers, in each process that sends requests": (
        MetricSpec("router_requests", _C, _D, "Requests routed to a deployment."),
        MetricSpec(
            "router_queued_requests", _G, _D, "Requests waiting for a slot, in the router or at a replica."
        ),
        MetricSpec("router_ongoing_requests", _G, _D, "Requests of this process in flight at replicas."),
        MetricSpec("router_queue_wait_seconds", _T, _D, "Seconds that a queued request waited."),
        MetricSpec(
            "router_rejections", _C, _D, "Requests rejected because max_queued_requests were waiting."
        ),
        MetricSpec(
            "router_retries", _C, (*_D, "cause"), "Requests retried because a replica was busy or lost."
        ),
        MetricSpec(
            "router_hedges",
            _C,
            (*_D, "outcome"),
            "Second attempts of slow requests; won if the second attempt answered first.",
        ),
        MetricSpec(
            "router_fallbacks",
            _C,
            (*_D, "cause"),
            "Requests routed without the router of request_router_config, which failed.",
        ),
    ),
    "Deployments, in each process that runs their replicas": (
        MetricSpec("deployment_requests", _C, _D, "Requests that began."),
        MetricSpec("deployment_errors", _C, _D, "Requests for which user code raised an error."),
        MetricSpec("deployment_cancellations", _C, _D, "Cancelled requests, timeouts included."),
        MetricSpec("deployment_timeouts", _C, _D, "Requests cancelled at their deadline."),
        MetricSpec("deployment_rejections", _C, _D, "Requests sent back because every slot was taken."),
        MetricSpec("deployment_request_duration_seconds", _T, _D, "Seconds that a request held its slot."),
        MetricSpec("deployment_loop_blocks", _C, _D, "Times that user code blocked its event loop."),
        MetricSpec("deployment_health_check_failures", _C, _D, "Failed health checks."),
        MetricSpec("deployment_replica_starts", _C, _D, "Replicas that have started."),
        MetricSpec("deployment_replica_start_failures", _C, _D, "Replicas that failed to start."),
        MetricSpec(
            "deployment_replica_startup_seconds",
            _T,
            _D,
            "Seconds that replicas took to start.",
            LIFE_BUCKETS_S,
        ),
        MetricSpec(
            "deployment_replica_shutdown_seconds",
            _T,
            _D,
            "Seconds that replicas took to stop.",
            LIFE_BUCKETS_S,
        ),
        MetricSpec(
            "deployment_reconfigure_seconds",
            _T,
            _D,
            "Seconds that replicas took to apply changed options, with the wait for running requests.",
            LIFE_BUCKETS_S,
        ),
        MetricSpec("deployment_health_check_seconds", _T, _D, "Seconds that health checks took."),
        MetricSpec("batch_size", _T, (*_D, "method"), "Items in a batch.", SIZE_BUCKETS),
        MetricSpec("batch_wait_seconds", _T, (*_D, "method"), "Seconds that an item waited for its batch."),
        MetricSpec("batch_duration_seconds", _T, (*_D, "method"), "Seconds that a batch ran."),
        MetricSpec(
            "batch_utilization_ratio",
            _T,
            (*_D, "method"),
            "Share of max_batch_size that a batch had.",
            SHARE_BUCKETS,
        ),
        MetricSpec("multiplexed_model_requests", _C, _D, "Requests of user code for a multiplexed model."),
        MetricSpec("multiplexed_model_hits", _C, _D, "Requests for a multiplexed model that was loaded."),
        MetricSpec("multiplexed_model_loads", _C, _D, "Loads of models that began."),
        MetricSpec("multiplexed_model_load_failures", _C, _D, "Loads of models that failed."),
        MetricSpec("multiplexed_model_unloads", _C, _D, "Models that were unloaded."),
        MetricSpec("multiplexed_model_load_seconds", _T, _D, "Seconds per load of a model.", LIFE_BUCKETS_S),
        MetricSpec(
            "multiplexed_model_unload_seconds", _T, _D, "Seconds per unload of a model.", LIFE_BUCKETS_S
        ),
        MetricSpec(
            "continuous_step_duration_seconds",
            _T,
            (*_D, "method"),
            "Seconds that a step of a continuous batch took.",
        ),
        MetricSpec("continuous_outputs", _C, (*_D, "method"), "Outputs of a continuous batch."),
        MetricSpec(
            "continuous_preemptions",
            _C,
            (*_D, "method"),
            "Times that a request lost its slot for lack of memory.",
        ),
        MetricSpec(
            "tasks_ended",
            _C,
            (*_D, "queue", "state"),
            "Tasks whose run ended in this replica, by their new state.",
        ),
    ),
    "Replicas, while they exist": (
        MetricSpec("replica_requests", _C, _R, "Requests that began."),
        MetricSpec("replica_errors", _C, _R, "Requests for which user code raised an error."),
        MetricSpec("replica_request_duration_seconds", _T, _R, "Seconds that a request held its slot."),
        MetricSpec("replica_ongoing_requests", _G, _R, "Requests that hold a slot."),
        MetricSpec(
            "replica_queued_requests",
            _G,
            _R,
            "Requests waiting for a slot, and requests and calls waiting for their batch.",
        ),
        MetricSpec("batch_queued_items", _G, (*_R, "method"), "Items that wait for their batch."),
        MetricSpec(
            "continuous_active_requests", _G, (*_R, "method"), "Requests with a slot of a continuous batch."
        ),
        MetricSpec(
            "continuous_queued_requests",
            _G,
            (*_R, "method"),
            "Requests that wait for a slot of a continuous batch.",
        ),
        MetricSpec(
            "continuous_queued_cost",
            _G,
            (*_R, "method"),
            "Total cost of these waiting requests by cost_fn, such as tokens.",
        ),
        MetricSpec(
            "task_queue_tasks",
            _G,
            (*_R, "queue", "state"),
            "Tasks in the replica's queue. All consumers of the queue report the same, so use the maximum.",
        ),
        MetricSpec(
            "task_queue_oldest_seconds",
            _G,
            (*_R, "queue"),
            "Age of the oldest task that is due, in seconds.",
        ),
        MetricSpec("replica_abandoned_requests", _G, _R, "Cancelled calls that still run."),
        MetricSpec("replica_max_ongoing_requests", _G, _R, "Number of slots."),
        MetricSpec("replica_healthy", _G, _R, "1 while health checks succeed, else 0."),
        MetricSpec("replica_start_time_seconds", _G, _R, "Time of its start, in seconds since the epoch."),
        MetricSpec("replica_startup_duration_seconds", _G, _R, "Duration of its start, in seconds."),
        MetricSpec("replica_multiplexed_models", _G, _R, "Multiplexed models that are loaded."),
        MetricSpec("replica_multiplexed_model", _G, (*_R, "model"), "1 for each loaded model, at most 100."),
    ),
    "The controller, in one process": (
        MetricSpec(
            "controller_epoch", _G, _I, "Number of this controller; each new one has a higher number."
        ),
        MetricSpec("store_owned", _G, _I, "1 if this instance owns the store, 0 if another cluster does."),
        MetricSpec("controller_start_time_seconds", _G, _I, "Time of its start, in seconds since the epoch."),
        MetricSpec("control_loop_duration_seconds", _T, _I, "Seconds per round of the control loop."),
        MetricSpec("control_loop_failures", _C, _I, "Steps of the loop that failed and are retried."),
        MetricSpec("replica_moves", _C, _I, "Moves of replicas to better workers that began."),
        MetricSpec("goals_pending", _G, _I, "Requested changes that are in progress."),
        MetricSpec("goals", _C, (*_I, "outcome"), "Changes that have ended, by outcome: done or failed."),
        MetricSpec("deployment_wanted_replicas", _G, _D, "Target number of replicas."),
        MetricSpec("deployment_replicas", _G, (*_D, "state"), "Replicas by state."),
        MetricSpec("application_status", _G, (*_I, "application", "status"), "1 for the current status."),
        MetricSpec("deployment_status", _G, (*_D, "status"), "1 for the current status."),
        MetricSpec("proxy_status", _G, (*_I, "proxy", "status"), "1 for the current status."),
        MetricSpec("workers", _G, (*_I, "state"), "Dask workers by whether they can hold actors."),
        MetricSpec("autoscaling_wanted_replicas", _G, _D, "Replicas that the autoscaler wants."),
        MetricSpec(
            "autoscaling_reason",
            _G,
            (*_D, "reason"),
            "1 for the current reason, in which N replaces each number.",
        ),
        MetricSpec("long_poll_waiting_calls", _G, _I, "Calls of listen_for_change that wait for a change."),
    ),
    "Updates from the controller, in each process that listens": (
        MetricSpec("long_poll_delay_seconds", _T, _I, "Seconds from a change's publication to its use."),
        MetricSpec("long_poll_fetches", _C, _I, "Fetches of published values."),
        MetricSpec("long_poll_fetch_failures", _C, _I, "Fetches that failed and were retried."),
    ),
    "Channels, in each process": (
        MetricSpec("channels", _G, (), "Open connections that carry requests between processes."),
        MetricSpec("channel_connections", _C, (), "Channels opened, from either side."),
        MetricSpec("channel_reconnects", _C, (), "Channels opened because the last one broke."),
        MetricSpec("channel_dial_failures", _C, (), "Channels that failed to open."),
        MetricSpec(
            "channel_refusals",
            _C,
            ("cause",),
            "Connections closed before they became channels (late, stranger), or after a frame that could "
            "not be handled (invalid).",
        ),
        MetricSpec(
            "channel_sent_bytes", _C, (), "Bytes sent over channels, those in shared memory included."
        ),
        MetricSpec(
            "channel_received_bytes", _C, (), "Bytes received over channels, those in shared memory included."
        ),
    ),
    "The supervisor, in the scheduler's process": (
        MetricSpec("supervisor_instances", _G, (), "Instances on this Dask cluster."),
        MetricSpec("supervisor_hosts", _G, (), "Workers that can hold actors."),
        MetricSpec("supervisor_refused_workers", _G, (), "Workers without a compatible daskserve."),
        MetricSpec("supervisor_controller_starts", _C, _I, "Started controllers, the first one included."),
        MetricSpec(
            "supervisor_http_refusals",
            _C,
            ("cause",),
            "HTTP requests to the scheduler that were refused: of another site, or with too large a body.",
        ),
    ),
    "Logs, in each worker": (
        MetricSpec(
            "log_records_dropped",
            _C,
            ("reason",),
            "Log records that were lost: handlers (queue) or the access log (access) were too slow, or a "
            "file or standard output could not be written.",
        ),
    ),
    "Payload logs": (
        MetricSpec(
            "payload_log_requests", _C, _D, "Requests that were written to the sink of the payload log."
        ),
        MetricSpec(
            "payload_log_dropped",
            _C,
            (*_D, "reason"),
            "Sampled requests that were not written: too many waited (queue), the redacting function failed "
            "(redact), a value could not be shown (events), or the replica ended first (sink, stop).",
        ),
    ),
    "In every process": (
        MetricSpec("build_info", _G, ("version",), "1, with the version of daskserve as a label."),
        MetricSpec(
            "otlp_export_failures",
            _C,
            (),
            "Exports to an OpenTelemetry collector that failed; only if one is configured.",
        ),
    ),
}

METRICS: Mapping[str, MetricSpec] = {spec.short_name: spec for each in SECTIONS.values() for spec in each}
