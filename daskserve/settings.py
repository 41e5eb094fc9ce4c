"""Site-wide defaults, read from Dask's own configuration under ``daskserve``.

A YAML file in Dask's configuration path, ``dask.config.set({"daskserve.http.port": 8080})`` or the
variable ``DASK_DASKSERVE__HTTP__PORT`` all work, with Dask's own precedence. Arguments of a call win over
them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

import dask.config


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of the control path, in seconds."""

    #: A change (``create_backend`` and the like) that has not come about by then is taken back.
    change_s: float = 60.0
    #: All proxies must listen by then, or ``start`` fails.
    proxy_s: float = 60.0
    #: The Dask scheduler must answer by then.
    connect_s: float = 5.0
    #: How long an instance outlives a creator that vanished, unless it is detached.
    grace_s: float = 5.0
    #: A replica's constructor may take this long.
    start_s: float = 600.0


@dataclass(frozen=True, slots=True)
class LocalClusterSize:
    """What ``start()`` makes for those who have no cluster."""

    n_workers: int = 2
    threads_per_worker: int = 4


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How daskserve runs in worker processes."""

    #: Seconds after which a thread that computes in Python must let another one have the interpreter;
    #: Python's own default is 0.005, None leaves it. A request waits that long, several times, behind batch
    #: work in the same process; see ``benchmarks/bench_start.py``.
    switch_interval_s: float | None = 0.001
    #: Whether to keep the garbage collector from walking over everything that is there once replicas have
    #: started, over and over; without it, one request in a hundred waits 40 ms for that.
    gc_freeze: bool = True
    #: Whether event loops that daskserve makes (those of replicas, and of the workers that it starts itself)
    #: are uvloop's where that is installed, for more requests per second. The loops of workers that others
    #: start go by Dask's own ``distributed.admin.event-loop``.
    uvloop: bool = True


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """How a user program's requests get to the workers."""

    #: ``direct``: each worker is dialled. ``scheduler``: all goes through the scheduler's own connection.
    #: ``auto``: through the scheduler where a worker cannot be dialled.
    route: str = "auto"
    #: A worker that has not answered by then cannot be dialled.
    direct_timeout_s: float = 1.5
    #: After that long a host that could not be dialled is tried again, by new connections.
    retry_direct_s: float = 300.0
    #: A connection is lost when the machine at its other end has acknowledged nothing for so long; at least
    #: 3, or 0 to leave that to TCP.
    lost_after_s: float = 5.0


def channel() -> ChannelSettings:
    """Return how to reach workers, from ``daskserve.channel.*``."""
    found = ChannelSettings(**_known("daskserve.channel", ChannelSettings))
    if found.route not in ("auto", "direct", "scheduler"):
        raise ValueError(
            f"Dask's configuration has daskserve.channel.route: {found.route!r}; it must be auto, direct or "
            "scheduler."
        )
    if found.lost_after_s != 0 and not found.lost_after_s >= 3:
        raise ValueError(
            f"Dask's configuration has daskserve.channel.lost-after-s: {found.lost_after_s!r}; it must be at "
            "least 3, or 0 for never."
        )
    return found


def process() -> ProcessSettings:
    """Return what to change in a worker process, from ``daskserve.process.*``."""
    return ProcessSettings(**_known("daskserve.process", ProcessSettings))


def timeouts() -> Timeouts:
    """Return the deadlines, from ``daskserve.timeouts.*``."""
    return Timeouts(**_known("daskserve.timeouts", Timeouts))


def local_cluster_size() -> LocalClusterSize:
    """Return the size of a self-made cluster, from ``daskserve.local-cluster.*``."""
    return LocalClusterSize(**_known("daskserve.local-cluster", LocalClusterSize))


def http_defaults() -> dict[str, Any]:
    """Return defaults for `daskserve.options.config.HTTPOptions`, from ``daskserve.http.*``."""
    return _section("daskserve.http")


def process_variables() -> dict[str, str]:
    """Return this process's environment variables, which its child processes inherit."""
    return dict(os.environ)


def _section(path: str) -> dict[str, Any]:
    found = dask.config.get(path, default=None) or {}
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def _known(path: str, model: type[Any]) -> dict[str, Any]:
    found = _section(path)
    names = {field.name for field in fields(model)}
    unknown = sorted(set(found) - names)
    if unknown:
        raise ValueError(
            f"Dask's configuration has no option {path}.{unknown[0]}; known: {', '.join(sorted(names))}"
        )
    return found
