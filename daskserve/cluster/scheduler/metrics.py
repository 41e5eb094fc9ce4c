"""The supervisor's metrics, exported by the scheduler's process."""

from __future__ import annotations

from collections.abc import Mapping

from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.cluster.scheduler.http.site_guard import SiteGuard
from daskserve.common.types import InstanceName
from daskserve.telemetry.table import MetricSample


class SupervisorMetrics:
    """A `daskserve.telemetry.table.Source`."""

    def __init__(
        self, instances: Mapping[InstanceName, Instance], hosts: HostRegistry, guard: SiteGuard
    ) -> None:
        self._instances = instances
        self._hosts = hosts
        self._guard = guard

    def samples(self) -> list[MetricSample]:
        """Return the current metrics."""
        instances = list(self._instances.values())
        return [
            ("supervisor_instances", (), len(instances)),
            ("supervisor_hosts", (), self._hosts.count),
            ("supervisor_refused_workers", (), len(self._hosts.refused())),
            *(("supervisor_http_refusals", (cause,), n) for cause, n in self._guard.refusals.items()),
            *(("supervisor_controller_starts", (each.name,), each.starts) for each in instances),
        ]
