"""The history of an instance as plain values. Pure."""

from __future__ import annotations

from typing import Any

from daskserve.control.decisions.failed_deploys import application_not_found
from daskserve.control.decisions.history.events import KEPT_S
from daskserve.control.decisions.history.revisions import current
from daskserve.control.records.state import State

#: Maximum number of events in one answer.
MAX_EVENTS = 1000


def history_of(state: State, application: str) -> dict[str, Any]:
    """Return the revisions of an application, even of a deleted one.

    Raises
    ------
    NotFoundError There is no such application, and there never was.
    """
    revisions = state.revisions.of(application)
    if not revisions and state.apps.get(application) is None:
        raise application_not_found(state, application)
    running = current(revisions)
    return {
        "application": application,
        "current": None if running is None else running.number,
        "revisions": [each.to_plain() for each in revisions],
    }


def events_after(
    state: State,
    after: int | None,
    *,
    application: str | None = None,
    limit: int = MAX_EVENTS,
    since_s: float | None = None,
    wall: float,
) -> dict[str, Any]:
    """Return events, oldest first, and the number after which the next call continues."""
    limit = max(1, min(limit, MAX_EVENTS))
    start = wall - (KEPT_S if since_s is None else min(since_s, KEPT_S))
    found: list[dict[str, Any]] = []
    for row in state.events.after(after or 0):
        if row.at < start:
            continue
        for index in range(len(row.entries)):
            if row.number + index <= (after or 0):
                continue
            each = row.to_plain(index)
            if application is None or each["application"] == application:
                found.append(each)
        if after is not None and len(found) >= limit:
            break
    else:
        found = found[-limit:] if after is None else found[:limit]
        return {"events": found, "next": state.events.last}
    found = found[:limit]
    return {"events": found, "next": found[-1]["number"]}
