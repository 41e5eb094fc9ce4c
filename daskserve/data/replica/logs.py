"""The logs of a replica: its settings in the logs of the process, its access log and its payload log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from daskserve.cluster.protocols.base import ContextWith
from daskserve.common.types import split_deployment_tag
from daskserve.data.replica.payloads import ReplicaPayloads
from daskserve.options.start_messages import ReplicaStart
from daskserve.telemetry.logs.process import ProcessLogs
from daskserve.telemetry.logs.records import Tags
from daskserve.telemetry.logs.settings import LogSettings


class ReplicaLogs:
    """Configures how the process logs for one replica.

    Attributes
    ----------
    note : callable or None
        ``note(method, request_id, status, seconds)`` writes a line to the access log; None without one.
    payloads : ReplicaPayloads
        Samples its requests.
    """

    def __init__(self, logs: ProcessLogs | None, start: ReplicaStart, context: ContextWith[Any]) -> None:
        self._logs = logs
        self._backend, self._replica = start.backend_tag, start.replica_tag
        self._clock, self._instance = context.clock, context.spec.instance
        self.payloads = ReplicaPayloads(start, context.spec.instance, context.clock, context.rng)
        self.note: Callable[[str, str, int, float], None] | None = None
        self._set(getattr(start.config, "logging_config", None))

    async def configure(self, config: Mapping[str, Any]) -> None:
        """Apply the deployment's changed logging options."""
        self._set(config.get("logging_config"))
        await self.payloads.configure(config.get("payload_logging"))

    def _set(self, config: Mapping[str, Any] | None) -> None:
        if self._logs is None:
            return
        settings = _configured(self._logs, self._backend, self._replica, self._instance, config)
        self.note = self._note if settings is not None and settings.enable_access_log else None

    def _note(self, method: str, request_id: str, status: int, seconds: float) -> None:
        assert self._logs is not None
        now, name = self._clock.wall(), method.encode()
        ids = request_id, "", "", self._backend, self._replica, "", self._instance
        # The fields of an `Access`.
        self._logs.access((now, "CALL", name, b"", status, seconds, None, "", *ids))

    async def close(self) -> None:
        """Write the remaining records, and forget the replica; idempotent."""
        await self.payloads.configure(None)
        if self._logs is not None:
            self._logs.forget(self._replica)


@contextmanager
def replica_log_context(start: ReplicaStart, context: ContextWith[Any]) -> Iterator[None]:
    """Apply a replica's logging settings to records about it, although its process has ended."""
    logs, config = context.logs, getattr(start.config, "logging_config", None)
    if logs is None:
        yield
        return
    _configured(logs, start.backend_tag, start.replica_tag, context.spec.instance, config)
    try:
        yield
    finally:
        logs.forget(start.replica_tag)


def _configured(
    logs: ProcessLogs, backend: str, replica: str, instance: str, config: Mapping[str, Any] | None
) -> LogSettings | None:
    application, deployment = split_deployment_tag(backend)
    tags = Tags(application, deployment, replica, component="replica", instance=instance)
    return logs.configure(replica, tags, config)
