"""Site-wide defaults, read from the section ``daskserve`` of Dask's configuration.

You can set them in a YAML file in Dask's configuration path, with
``dask.config.set({"daskserve.http.port": 8080})``, or with a variable such as ``DASK_DASKSERVE__HTTP__PORT``.
Dask's precedence applies. Arguments of a call override all of these.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of the control path, in seconds."""

    #: Time without progress after which a change (such as ``serve.run``) fails and is rolled back.
    change_s: float = 60.0
    #: Time within which all proxies must listen before ``start`` fails.
    proxy_s: float = 60.0
    #: Time within which the Dask scheduler must answer.
    connect_s: float = 5.0
    #: How long an instance outlives a program that started it and crashed, unless the instance is detached.
    grace_s: float = 5.0


@dataclass(frozen=True, slots=True)
class LocalClusterSize:
    """The cluster that ``start()`` creates if there is none."""

    #: Number of worker processes.
    n_workers: int = 2
    #: Number of threads per worker process.
    threads_per_worker: int = 4
    #: Whether to slow down or switch off Dask's own periodic work in this cluster, such as its profiler,
    #: unless you have set Dask's options.
    quiet_dask: bool = True


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Settings of worker processes."""

    #: Python's thread switch interval, in seconds; None keeps Python's default, which is 0.005. A request
    #: waits for this time, often several times, behind batch work in the same process.
    switch_interval_s: float | None = 0.001
    #: Whether to exclude the objects that exist once replicas have started from garbage collection. Without
    #: it, one request in a hundred waits 40 ms for the garbage collector.
    gc_freeze: bool = True
    #: Maximum number of new objects before a garbage collection of young objects, while these collections
    #: find no garbage: requests in flight cause most of them. Once one finds garbage, Python's own threshold
    #: applies again (the first one of ``gc``, 700 to 2,000). None: it always applies.
    gc_threshold: int | None = 10_000
    #: Whether event loops that daskserve creates (those of replicas, and of workers that it starts) use
    #: uvloop if it is installed, for more requests per second. For all other workers, Dask's own option
    #: ``distributed.admin.event-loop`` applies.
    uvloop: bool = True
    #: Whether a separate thread calls the handlers of ``logging`` in a worker's process, so that a slow
    #: handler delays no request.
    log_thread: bool = True
    #: The folder of virtual environments and unpacked files that deployments request with ``env``. You may
    #: delete its contents while nothing runs.
    environments_folder: str = "~/.cache/daskserve"
    #: Days after which an environment that no replica has used is deleted, when another one is made; None
    #: keeps all.
    environments_days: float | None = 30.0
    #: Seconds between SIGTERM to a worker and the SIGKILL of its sender (``TimeoutStopSec`` of systemd,
    #: ``terminationGracePeriodSeconds`` of Kubernetes, ``KillWait`` of SLURM): within this time, its actors
    #: move and its requests complete, as when it is retired. 0 leaves SIGTERM to Dask, whose workers end at
    #: once.
    termination_grace_s: float = 30.0

    @property
    def environments(self) -> Path:
        """The path of ``environments_folder``."""
        return Path(self.environments_folder).expanduser()


#: Maximum number of buckets of durations, because each bucket is a series of each histogram.
MAX_BUCKETS = 100


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Settings of metrics, in each process."""

    #: The URL at which an OpenTelemetry collector takes metrics by OTLP over HTTP, such as
    #: ``http://collector:4318/v1/metrics``; needs the extra ``tracing``. Default: the environment variable
    #: ``OTEL_EXPORTER_OTLP_METRICS_ENDPOINT``. None: metrics are only scraped.
    otlp_endpoint: str | None = None
    #: Seconds between two exports of a process.
    otlp_interval_s: float = 15.0
    #: Upper bounds of the buckets of durations, in milliseconds, as a list. Set the same for the scheduler,
    #: all workers and programs. None: 18 bounds from 0.1 ms to 60 s.
    latency_buckets_ms: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Settings for the scheduler's HTTP server, and for the time without a scheduler."""

    #: How long workers serve, and programs wait, while the scheduler is away, in seconds; 0 leaves both to
    #: Dask, whose workers close at once.
    grace_s: float = 60.0
    #: Names by which programs reach the scheduler's HTTP server, besides its addresses, its own host name and
    #: names that only a local network has.
    allowed_hosts: Sequence[str] = ()
    #: Whether requests to the scheduler's HTTP server may deploy, delete, restart and roll back applications.
    #: Scaling has a switch in each deployment, ``external_scaler_enabled``.
    http_changes: bool = True


@dataclass(frozen=True, slots=True)
class ErrorSettings:
    """How errors are shown to the programs that get them."""

    #: Whether tracebacks of errors include the frames of daskserve, which a bug report about daskserve needs.
    #: Frames of user code are always included.
    full_tracebacks: bool = False
    #: Address of the site with this documentation, as ``make docs`` builds it: errors then end with the
    #: address of their section. ``daskserve docs`` shows sections without a site.
    site: str | None = None


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Settings of the controllers of instances that this process starts."""

    #: Import path of a function that each controller calls, without arguments, when it starts: to configure
    #: logging, for example. The proxies have ``daskserve.http.proxy-callback``.
    callback: str | None = None
    #: Bytes of code that only old revisions of applications need, which an instance keeps for rollbacks.
    #: Beyond it, the oldest revisions lose their code.
    history_bytes: int = 256 * 1024 * 1024
    #: How many applications one configuration file or request may declare, and how many deployments in all of
    #: them it may name.
    max_applications: int = 4_000
    max_deployments: int = 20_000


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """Settings of the connections from programs and workers to the workers."""

    #: ``direct``: connect to each worker. ``scheduler``: programs send everything through the scheduler's
    #: connection. ``auto``: use the scheduler for workers that cannot be reached directly. Workers treat
    #: ``scheduler`` as ``auto``.
    route: str = "auto"
    #: Timeout of a direct connection to a worker, in seconds.
    direct_timeout_s: float = 1.5
    #: Maximum time until an unreachable host is tried directly again, in seconds; between workers at most 30.
    retry_direct_s: float = 300.0
    #: Time without an acknowledgement from the other machine after which a connection is lost, in seconds; at
    #: least 3, or 0 to leave this to TCP.
    lost_after_s: float = 5.0


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """How processes that send requests choose replicas."""

    #: How long a request waits for a free slot of a replica that has its multiplexed model while other
    #: replicas have free slots, in seconds; after that, any replica loads the model.
    model_matching_timeout_s: float = 1.0


#: Limit of ``retry_direct_s`` between workers, which reach each other directly unless the network is broken.
WORKER_RETRY_S = 30.0

#: In a child process: the settings of its worker.
given_process: ContextVar[ProcessSettings | None] = ContextVar("daskserve_given_process", default=None)
given_metrics: ContextVar[MetricsSettings | None] = ContextVar("daskserve_given_metrics", default=None)


def channel() -> ChannelSettings:
    """Return the channel settings, from ``daskserve.channel.*``."""
    found = _read("daskserve.channel", ChannelSettings)
    if found.route not in ("auto", "direct", "scheduler"):
        raise _refused("daskserve.channel.route", found.route, "auto, direct or scheduler")
    if found.lost_after_s != 0 and not found.lost_after_s >= 3:
        advice = "at least 3, or to 0 to leave this to TCP"
        raise _refused("daskserve.channel.lost-after-s", found.lost_after_s, advice)
    return found


def worker_channel() -> ChannelSettings:
    """Return the channel settings of a worker."""
    found = channel()
    return replace(
        found,
        route="auto" if found.route == "scheduler" else found.route,
        retry_direct_s=min(found.retry_direct_s, WORKER_RETRY_S),
    )


def errors() -> ErrorSettings:
    """Return the settings of errors, from ``daskserve.errors.*``."""
    return _read("daskserve.errors", ErrorSettings)


def routing() -> RoutingSettings:
    """Return the settings of the choice of replicas, from ``daskserve.routing.*``."""
    found = _read("daskserve.routing", RoutingSettings)
    wait_s = found.model_matching_timeout_s
    if not 0 <= wait_s < math.inf:
        advice = "a number of seconds, or to 0 so that no request waits for its model"
        raise _refused("daskserve.routing.model-matching-timeout-s", wait_s, advice)
    return found


def controller() -> ControllerSettings:
    """Return the settings of controllers, from ``daskserve.controller.*``."""
    return _read("daskserve.controller", ControllerSettings)


def process() -> ProcessSettings:
    """Return the settings of worker processes, from ``daskserve.process.*``."""
    given = given_process.get()
    if given is not None:
        return given
    found = _read("daskserve.process", ProcessSettings)
    grace_s = found.termination_grace_s
    if not 0 <= grace_s < math.inf:
        raise _refused(
            "daskserve.process.termination-grace-s",
            grace_s,
            "the number of seconds between SIGTERM and SIGKILL of your process manager, or to 0 to leave "
            "SIGTERM to Dask",
        )
    return found


def metrics() -> MetricsSettings:
    """Return the settings of metrics, from ``daskserve.metrics.*``."""
    given = given_metrics.get()
    if given is not None:
        return given
    found = _read("daskserve.metrics", MetricsSettings)
    period_s = found.otlp_interval_s
    if not 0 < period_s < math.inf:
        raise _refused("daskserve.metrics.otlp-interval-s", period_s, "a number of seconds above 0")
    if found.latency_buckets_ms is None:
        return found
    return replace(found, latency_buckets_ms=_bounds_in(found.latency_buckets_ms))


def _bounds_in(given: Any) -> tuple[float, ...]:
    try:
        bounds = [float(each) for each in (given if isinstance(given, (list, tuple)) else (given,))]
    except (TypeError, ValueError):
        bounds = []
    ascends = all(low < high for low, high in itertools.pairwise(bounds))
    if not (0 < len(bounds) <= MAX_BUCKETS and ascends and bounds[0] > 0 and bounds[-1] < math.inf):
        advice = f"a list of at most {MAX_BUCKETS} ascending numbers of milliseconds, such as [1, 10, 100]"
        raise _refused("daskserve.metrics.latency-buckets-ms", given, advice)
    return tuple(bounds)


def scheduler() -> SchedulerSettings:
    """Return the settings of the scheduler, from ``daskserve.scheduler.*``."""
    found = _read("daskserve.scheduler", SchedulerSettings)
    names = found.allowed_hosts
    return replace(found, allowed_hosts=(names,) if isinstance(names, str) else tuple(names))


def timeouts() -> Timeouts:
    """Return the timeouts of the control path, from ``daskserve.timeouts.*``."""
    return _read("daskserve.timeouts", Timeouts)


def local_cluster_size() -> LocalClusterSize:
    """Return the settings of a cluster that ``start()`` creates, from ``daskserve.local-cluster.*``."""
    return _read("daskserve.local-cluster", LocalClusterSize)


def is_local() -> bool:
    """Return whether ``serve.run`` always serves in this process, from ``daskserve.local-testing-mode``."""
    return bool(_configured("daskserve.local-testing-mode"))


def http_defaults() -> dict[str, Any]:
    """Return defaults for `daskserve.options.http.HTTPOptions`, from ``daskserve.http.*``."""
    return _section("daskserve.http")


def logging_defaults() -> dict[str, Any] | None:
    """Return defaults for `daskserve.options.logging.LoggingConfig`, from ``daskserve.logging.*``."""
    return _section("daskserve.logging") or None


def process_variables() -> dict[str, str]:
    """Return this process's environment variables, which its child processes inherit."""
    return dict(os.environ)


def add_process_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process, and of the child processes that it starts from now on."""
    os.environ.update(variables)


def _configured(path: str) -> Any:
    import dask.config  # takes 0.1 s, and child processes do not need it

    return dask.config.get(path, default=None)


def _section(path: str) -> dict[str, Any]:
    found = _configured(path) or {}
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def _read(path: str, model: Callable[..., T]) -> T:
    """Return a section as an instance of a dataclass; raise `ValueError` if an option is wrong."""
    found = _section(path)
    kinds = {field.name: str(field.type) for field in fields(cast(Any, model))}
    unknown = sorted(found.keys() - kinds)
    if unknown:
        raise ValueError(
            f"Dask's configuration has {path}.{unknown[0]}, which is not an option; remove it or use one of: "
            f"{', '.join(sorted(kinds))}"
        )
    return model(**{name: _checked(path, name, kinds[name], value) for name, value in found.items()})


def _refused(option: str, value: Any, advice: str) -> ValueError:
    return ValueError(f"Dask's configuration has {option}: {value!r:.200}; set it to {advice}.")


def _checked(path: str, name: str, kind: str, value: Any) -> Any:
    """Return the value of an option; a number of bytes may be a size, such as ``256 MiB``."""
    if kind.partition(" |")[0] not in ("int", "float") or (value is None and "None" in kind):
        return value
    if isinstance(value, str) and name.endswith("_bytes"):
        value = _size_of(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        example = ", such as 1000000 or '256 MiB'" if name.endswith("_bytes") else ""
        raise _refused(f"{path}.{name.replace('_', '-')}", value, f"a number{example}")
    return value


def _size_of(text: str) -> int | str:
    from dask.utils import parse_bytes

    try:
        return int(parse_bytes(text))
    except ValueError:
        return text
