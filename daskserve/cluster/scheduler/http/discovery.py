"""HTTP service discovery for Prometheus: a list of all metrics targets, served by the scheduler.

Dask serves ``/metrics`` in the scheduler and in every worker, and workers usually listen on random ports.
While instances run, the scheduler's HTTP server answers `PATH` with the current targets, in the format of
https://prometheus.io/docs/prometheus/latest/http_sd/. So workers can come and go without configuration.

Workers that share a process share its metrics registry. Only one worker per process is listed; otherwise
Prometheus would count every metric several times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import dask.config
from distributed import Scheduler
from distributed.comm import get_address_host

from daskserve.cluster.dask.connection import dial
from daskserve.cluster.metrics_path import METRICS_PATH, metrics_path
from daskserve.cluster.scheduler.http.route import GuardedHandler, SchedulerRoutes
from daskserve.cluster.scheduler.http.site_guard import SiteGuard
from daskserve.common.types import WorkerAddress
from daskserve.loops.blocking import finish

#: Path of the list, below the scheduler's URL prefix.
PATH = "/daskserve/targets"
#: Addresses that a server can listen on but that cannot be connected to.
_WILDCARDS = frozenset(("", "0.0.0.0", "::"))

Target = dict[str, Any]


def reachable(bound: str, host: str) -> str:
    """Return the address of an HTTP server, from the address it listens on and the host that Dask uses."""
    return host if bound in _WILDCARDS else bound


def target(address: str, port: int, *, role: str, name: str, path: str) -> Target:
    """Return one entry of the list."""
    host = f"[{address}]" if ":" in address else address
    is_encrypted = dask.config.get("distributed.scheduler.dashboard.tls.cert", None)
    return {
        "targets": [f"{host}:{port}"],
        "labels": {
            "__metrics_path__": path,
            "__scheme__": "https" if is_encrypted else "http",
            "dask_role": role,
            "dask_name": name,
        },
    }


def one_per_process(found: Iterable[tuple[Any, Target]]) -> list[Target]:
    """Return the first target of each process; a target whose process is None is always kept."""
    seen = set()
    kept = []
    for process, each in found:
        if process is None or process not in seen:
            seen.add(process)
            kept.append(each)
    return kept


class Targets:
    """The list of targets, and its route on the scheduler's HTTP server.

    Parameters
    ----------
    facts_of
        Returns the facts that a worker's Host reported about its process, if any: `facts_of_server` and
        ``pid``.
    guard : SiteGuard
        Decides which requests are refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        facts_of: Callable[[WorkerAddress], Mapping[str, Any]],
        guard: SiteGuard,
    ) -> None:
        self._scheduler: Any = scheduler
        self._facts_of = facts_of
        arguments = {"targets": self, "guard": guard}
        self.routes = SchedulerRoutes(scheduler, (PATH, TargetsHandler, arguments))

    def current(self) -> list[Target]:
        """Return all current targets, the scheduler first."""
        scheduler = self._scheduler
        head_host = get_address_host(scheduler.address)
        found: list[tuple[Any, Target]] = []
        server = getattr(scheduler, "http_server", None)
        if server is not None:
            host = reachable(server.address, head_host)
            path = metrics_path(scheduler.http_application)
            entry = target(host, server.port, role="scheduler", name="scheduler", path=path)
            found.append(((head_host, os.getpid()), entry))
        for address, worker in scheduler.workers.items():
            port = worker.services.get("dashboard")
            if port is None:
                continue
            facts = self._facts_of(address)
            path = facts.get("metrics_path", METRICS_PATH)
            process = (worker.host, facts["pid"]) if "pid" in facts else None
            host = reachable(facts.get("http_address", ""), worker.host)
            entry = target(host, port, role="worker", name=str(worker.name), path=path)
            found.append((process, entry))
        return one_per_process(found)

    async def describe(self) -> list[Target]:
        """Return all current targets; the supervisor's verb ``targets``."""
        return self.current()


class TargetsHandler(GuardedHandler):
    """Answers with the list of targets."""

    def initialize(self, targets: Targets, guard: SiteGuard) -> None:
        self._guard = guard
        self._targets = targets

    def get(self) -> None:
        if not self.is_refused():
            self.answer(200, self._targets.current())


def ask_targets(scheduler: str, timeout_s: float) -> list[Target]:
    """Return the targets over a Dask connection, for clients that cannot reach the scheduler's HTTP server.

    Raises
    ------
    NotRunningError
        No instance runs on the cluster.
    ClusterUnreachableError
        No Dask scheduler answers at the address.
    """
    connection = finish(dial(scheduler, timeout_s, asynchronous=False))
    try:
        found = connection.sync(connection.ask("targets"))
    finally:
        finish(connection.disconnect(asynchronous=False))
    return [{**each, "targets": list(each["targets"])} for each in found]
