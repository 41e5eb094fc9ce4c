"""Parameters of requests for the logs of an instance over HTTP. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: How long the workers may take to answer, and how long a request may wait for new records.
LOGS_S, MAX_WAIT_S = 10.0, 30
QUERY: Mapping[str, tuple[str, str]] = {
    "application": ("string", "Only records of this application."),
    "deployment": ("string", "Only records of this deployment."),
    "replica": ("string", "Only records of this replica: its tag, or the part after #."),
    "since_s": ("integer", "Only records of the last seconds."),
    "level": ("string", "The lowest level, such as WARNING."),
    "grep": ("string", "A string in the message, the traceback, or the id of the request or its trace."),
    "limit": ("integer", "Maximum number of records. Default: 1000."),
    "after": ("string", "The cursor next of an earlier response, to get later records."),
    "wait_s": ("integer", "How long to wait for records, at most 30 seconds."),
}


def message(query: Mapping[str, str], number: Callable[[str], int | None]) -> dict[str, Any]:
    """Return the message for a request of logs."""
    names = ("application", "deployment", "replica", "level", "grep", "after")
    found: dict[str, Any] = {name: query.get(name) or None for name in names}
    found["since_s"] = number("since_s")
    found["wait_s"] = number("wait_s") or 0
    limit = number("limit")
    return found | ({} if limit is None else {"limit": limit})


def takes_s(message: Mapping[str, Any]) -> float:
    """Return how long the answer may take."""
    return LOGS_S + min(float(message["wait_s"]), MAX_WAIT_S)
