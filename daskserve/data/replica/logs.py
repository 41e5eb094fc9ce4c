"""How a replica logs: its settings in the logs of its process, and the lines of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from daskserve.common.clock import Clock
from daskserve.common.types import split_deployment_tag
from daskserve.options.start_messages import ReplicaStart
from daskserve.telemetry.logs.process import ProcessLogs
from daskserve.telemetry.logs.records import Access, Tags


class ReplicaLogs:
    """Tells the logs of the process how one replica logs.

    Attributes
    ----------
    note : callable or None
        ``note(method, request_id, status, seconds)`` takes a call that has ended; None without access log.
    """

    def __init__(self, logs: ProcessLogs | None, start: ReplicaStart, clock: Clock) -> None:
        self._logs = logs
        self._backend, self._replica = start.backend_tag, start.replica_tag
        self._clock = clock
        self.note: Callable[[str, str, int, float], None] | None = None
        self.configure(getattr(start.config, "logging_config", None))

    def configure(self, config: Mapping[str, Any] | None) -> None:
        """Log by other settings from now on."""
        if self._logs is None:
            return
        application, deployment = split_deployment_tag(self._backend)
        tags = Tags(application, deployment, self._replica, component="replica")
        settings = self._logs.configure(self._replica, tags, config)
        self.note = self._note if settings is not None and settings.enable_access_log else None

    def _note(self, method: str, request_id: str, status: int, seconds: float) -> None:
        assert self._logs is not None
        self._logs.access(
            Access(
                self._clock.wall(),
                "CALL",
                method.encode(),
                b"",
                status,
                seconds,
                request_id=request_id,
                backend=self._backend,
                replica=self._replica,
            )
        )

    def close(self) -> None:
        """Forget the replica; idempotent."""
        if self._logs is not None:
            self._logs.forget(self._replica)
