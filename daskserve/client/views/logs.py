"""Log records of an instance, as its client returns them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from daskserve.client.views.plain import FromPlain
from daskserve.telemetry.logs.formats import line_of


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A log record of a replica, a proxy, the controller or another part of a worker.

    Attributes
    ----------
    time : float
        In seconds since the epoch.
    application, deployment, replica, request_id, trace_id, route : str
        Where it comes from; empty if it is not known.
    component : str
        ``replica``, ``proxy``, ``controller`` or ``worker``.
    exception : str
        The traceback; empty without one.
    worker : str
        The address of the Dask worker.
    access : dict or None
        For a line of the access log: ``method``, ``path``, ``status``, ``duration_s`` and ``client``.
    """

    time: float
    level: str
    logger: str
    message: str
    exception: str = ""
    application: str = ""
    deployment: str = ""
    replica: str = ""
    request_id: str = ""
    trace_id: str = ""
    route: str = ""
    component: str = ""
    worker: str = ""
    access: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return line_of(asdict(self))


@dataclass(frozen=True, slots=True)
class Logs(FromPlain):
    """Log records in the order of their times.

    Attributes
    ----------
    next : str
        The cursor for ``after``, with which the next call continues.
    missing : dict
        Workers that did not answer, each with the reason.
    dropped : dict
        How many records were lost, by worker and reason.
    problems : dict
        Why files cannot be written, by worker.
    """

    records: tuple[LogRecord, ...]
    next: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    problems: Mapping[str, list[str]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LogRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __str__(self) -> str:
        return "\n".join(map(str, self.records))
