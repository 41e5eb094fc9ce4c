"""Every metric that daskserve exports: name, kind, labels, meaning. The only definition, docs included.

Names and units follow https://prometheus.io/docs/practices/naming/: base units, ``_total`` on counters. Each
label has few values, whatever clients and users do: ``serve_instance`` is the name of the daskserve instance
(``instance`` is Prometheus' own label, the address that was scraped), ``deployment`` the backend's tag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from daskserve.figures.histogram import LATENCY_BUCKETS_S, SIZE_BUCKETS, Histogram


class MetricKind(Enum):
    """The kinds of metric that there are here."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


#: One value of one metric: its name, the values of its labels in their order, and the value.
Sample = tuple[str, tuple[str, ...], float | Histogram]

#: Labels of what comes and goes: their series vanish as a whole, and no total is kept of what they counted.
FLEETING = frozenset({"replica", "proxy"})


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. ``short_name`` is without ``daskserve_``, and of counters without ``_total``."""

    short_name: str
    kind: MetricKind
    labels: tuple[str, ...]
    meaning: str
    bounds: Sequence[float] = LATENCY_BUCKETS_S

    @property
    def name(self) -> str:
        """The name without the ending of its samples."""
        return f"daskserve_{self.short_name}"

    @property
    def exported_name(self) -> str:
        """The name that queries use."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name

    @property
    def is_folded(self) -> bool:
        """Whether the process keeps the total when whatever counted it has gone."""
        return self.kind is not MetricKind.GAUGE and not FLEETING & set(self.labels)


_I = ("serve_instance",)
_D = (*_I, "deployment")
_E = (*_I, "endpoint")
_R = (*_D, "replica")
_H = (*_I, "route", "endpoint")
_C, _G, _T = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

#: By section of the documentation.
SECTIONS: Mapping[str, Sequence[MetricSpec]] = {
    "HTTP, in each process with a proxy": (
        MetricSpec("http_requests", _C, (*_H, "method", "code"), "HTTP requests that have ended."),
        MetricSpec("http_errors", _C, (*_H, "cause"), "Requests that failed in daskserve, by cause."),
        MetricSpec("http_request_duration_seconds", _T, _H, "Seconds from a request's head to its end."),
        MetricSpec("http_ongoing_requests", _G, _I, "Requests that are being answered."),
        MetricSpec("http_timeouts", _C, _I, "Requests that were cut off at their deadline."),
        MetricSpec("http_cancellations", _C, _I, "Requests whose client left before there was an answer."),
    ),
    "Calls by handle, in each process that makes them": (
        MetricSpec("handle_requests", _C, _E, "Calls that were begun."),
        MetricSpec("handle_errors", _C, (*_E, "cause"), "Calls that raised, by cause."),
        MetricSpec("handle_request_duration_seconds", _T, _E, "Seconds from a call to its answer."),
    ),
    "Routers, in each process that sends requests": (
        MetricSpec("router_requests", _C, _D, "Requests that were to be sent to a deployment."),
        MetricSpec(
            "router_queued_requests", _G, _D, "Requests that wait for a slot, here or in line at a replica."
        ),
        MetricSpec("router_ongoing_requests", _G, _D, "Requests of this process that replicas have."),
        MetricSpec("router_queue_wait_seconds", _T, _D, "Seconds that a request waited, if it had to."),
        MetricSpec("router_rejections", _C, _D, "Requests refused because max_queued_requests waited."),
        MetricSpec(
            "router_retries", _C, (*_D, "cause"), "Requests sent again: the replica was busy, or lost."
        ),
    ),
    "Deployments, in each process with replicas of theirs": (
        MetricSpec("deployment_requests", _C, _D, "Requests that were begun."),
        MetricSpec("deployment_errors", _C, _D, "Requests that user code answered with an error."),
        MetricSpec("deployment_cancellations", _C, _D, "Requests given up by callers, timeouts included."),
        MetricSpec("deployment_timeouts", _C, _D, "Requests given up at their deadline."),
        MetricSpec("deployment_rejections", _C, _D, "Requests sent back because every slot was taken."),
        MetricSpec("deployment_request_duration_seconds", _T, _D, "Seconds that a request held its slot."),
        MetricSpec("deployment_loop_blocks", _C, _D, "Times that user code blocked its event loop."),
        MetricSpec("deployment_health_check_failures", _C, _D, "Health probes that failed."),
        MetricSpec("deployment_replica_starts", _C, _D, "Replicas that have started."),
        MetricSpec("deployment_replica_start_failures", _C, _D, "Replicas that failed to start."),
        MetricSpec("batch_size", _T, (*_D, "method"), "Items in a batch.", SIZE_BUCKETS),
        MetricSpec("batch_wait_seconds", _T, (*_D, "method"), "Seconds that an item waited for its batch."),
    ),
    "Replicas, as long as they live": (
        MetricSpec("replica_requests", _C, _R, "Requests that were begun."),
        MetricSpec("replica_errors", _C, _R, "Requests that user code answered with an error."),
        MetricSpec("replica_request_duration_seconds", _T, _R, "Seconds that a request held its slot."),
        MetricSpec("replica_ongoing_requests", _G, _R, "Requests that hold a slot."),
        MetricSpec(
            "replica_queued_requests",
            _G,
            _R,
            "Requests in line for a slot, and requests and calls that wait for their batch.",
        ),
        MetricSpec("replica_abandoned_requests", _G, _R, "Calls that were given up but run on."),
        MetricSpec("replica_max_ongoing_requests", _G, _R, "How many slots there are."),
        MetricSpec("replica_healthy", _G, _R, "1 while the health probes succeed, else 0."),
        MetricSpec("replica_start_time_seconds", _G, _R, "When it was up, in seconds since the epoch."),
        MetricSpec("replica_startup_duration_seconds", _G, _R, "How long its start took."),
    ),
    "The controller, in one process": (
        MetricSpec("controller_epoch", _G, _I, "Number of this controller; each new one has a higher one."),
        MetricSpec("controller_start_time_seconds", _G, _I, "When it was up, in seconds since the epoch."),
        MetricSpec("control_loop_duration_seconds", _T, _I, "Seconds that one round of the loop took."),
        MetricSpec("control_loop_failures", _C, _I, "Steps of the loop that failed and are tried again."),
        MetricSpec("goals_pending", _G, _I, "Changes that were asked for and are still coming about."),
        MetricSpec("goals", _C, (*_I, "outcome"), "Changes that ended: done or failed."),
        MetricSpec("deployment_wanted_replicas", _G, _D, "Replicas that are to run."),
        MetricSpec("deployment_replicas", _G, (*_D, "state"), "Replicas by state."),
        MetricSpec("deployment_status", _G, (*_D, "status"), "1 for the status that it has."),
        MetricSpec("proxy_status", _G, (*_I, "proxy", "status"), "1 for the status that it has."),
        MetricSpec("workers", _G, (*_I, "state"), "Dask workers by whether they can hold actors."),
        MetricSpec("autoscaling_wanted_replicas", _G, _D, "Replicas that the autoscaler wants."),
        MetricSpec("autoscaling_reason", _G, (*_D, "reason"), "1 for its reason, with N for each number."),
    ),
    "News from the controller, in each process that listens": (
        MetricSpec("long_poll_delay_seconds", _T, _I, "Seconds from a change's publication to its use."),
        MetricSpec("long_poll_fetches", _C, _I, "Times that published values were fetched."),
        MetricSpec("long_poll_fetch_failures", _C, _I, "Times that this failed and was tried again."),
    ),
    "Channels, in each process": (
        MetricSpec("channels", _G, (), "Connections that carry requests to other processes, or from them."),
        MetricSpec("channel_connections", _C, (), "Channels that were opened, from either side."),
        MetricSpec("channel_reconnects", _C, (), "Channels that were opened because the last one broke."),
        MetricSpec("channel_dial_failures", _C, (), "Channels that could not be opened."),
        MetricSpec("channel_sent_bytes", _C, (), "Bytes written to channels."),
        MetricSpec("channel_received_bytes", _C, (), "Bytes read from channels."),
    ),
    "The supervisor, in the scheduler's process": (
        MetricSpec("supervisor_instances", _G, (), "Instances that run on this Dask cluster."),
        MetricSpec("supervisor_hosts", _G, (), "Workers that can hold actors."),
        MetricSpec("supervisor_refused_workers", _G, (), "Workers without a fitting daskserve."),
        MetricSpec(
            "supervisor_controller_starts", _C, _I, "Controllers that were started, the first included."
        ),
    ),
    "In every process": (MetricSpec("build_info", _G, ("version",), "1; the version is daskserve's."),),
}

METRICS: Mapping[str, MetricSpec] = {spec.short_name: spec for each in SECTIONS.values() for spec in each}
