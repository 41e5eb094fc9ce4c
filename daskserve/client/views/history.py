"""The history of an instance, as `history` and `events` return it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from daskserve.client.views.plain import FromPlain
from daskserve.client.views.table import html_table, table
from daskserve.common.differences import Difference

#: Maximum number of characters for the changes in a table.
MAX_CHANGES = 90


@dataclass(frozen=True, slots=True)
class Revision(FromPlain):
    """One version of an application.

    Attributes
    ----------
    state : str
        ``DEPLOYING``, ``RUNNING``, ``SUPERSEDED``, ``FAILED``, ``ROLLED_BACK`` or ``DELETED``.
    at, ran_at, ended_at : float or None
        When it was requested, when it was complete, and when it ended, in seconds since the epoch.
    by : str
        The program that requested it.
    source : str
        ``run``, ``file`` or ``rollback``.
    origin : dict
        The name of the ``file`` that declared it, and its ``version``, such as a commit of Git.
    rollback_of : int or None
        The revision that it deploys again.
    changes : tuple of Difference
        What differs from the version before it.
    reason : str
        Why it failed, or what replaced it.
    can_return : bool
        Whether `rollback` can deploy it again: it has run, and its code is still kept.
    """

    number: int
    state: str
    at: float
    ran_at: float | None
    ended_at: float | None
    by: str
    source: str
    origin: Mapping[str, str]
    rollback_of: int | None
    changes: tuple[Difference, ...]
    reason: str
    can_return: bool

    def row(self) -> list[str]:
        """Return the revision's cells in the table."""
        parts = [f"back to {self.rollback_of}"] if self.rollback_of else []
        if self.origin:
            parts.append(" ".join(self.origin.values()))
        parts += map(str, self.changes)
        text = "; ".join(parts)
        shown = text if len(text) <= MAX_CHANGES else f"{text[: MAX_CHANGES - 3]}..."
        reason = self.reason.partition("\n")[0] if self.state == "FAILED" else ""
        if self.ran_at and not self.can_return:
            reason = "its code is no longer stored"
        return [str(self.number), self.state, _time(self.at), self.by, shown, reason]


HEAD = ("REVISION", "STATE", "AT", "BY", "CHANGES", "REASON")


@dataclass(frozen=True, slots=True)
class History(FromPlain):
    """The last revisions of an application, oldest first; print it for a table.

    Attributes
    ----------
    current : int or None
        The number of the revision that runs.
    """

    application: str
    current: int | None
    revisions: tuple[Revision, ...]

    def __str__(self) -> str:
        return table(HEAD, self._rows()) if self.revisions else f"{self.application}: no revisions"

    def _repr_html_(self) -> str:
        return html_table(HEAD, self._rows())

    def _rows(self) -> list[list[str]]:
        return [each.row() for each in self.revisions]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an instance, and why.

    Attributes
    ----------
    number : int
        Grows with time.
    at : float
        In seconds since the epoch.
    kind : str
        Such as ``DEPLOYED``, ``SCALED`` or ``REPLICA_LOST``.
    message : str
        What happened, with the cause.
    application, deployment : str
        The application and the deployment of the event; empty if it concerns several.
    subject : str
        The replica, proxy or endpoint; empty without one.
    by : str
        The program that caused the event; empty for decisions of the controller.
    """

    number: int
    at: float
    kind: str
    message: str
    application: str = ""
    deployment: str = ""
    subject: str = ""
    by: str = ""

    def __str__(self) -> str:
        by = f" (by {self.by})" if self.by else ""
        return f"{_time(self.at)}  {self.kind:<20}  {self.message}{by}"


@dataclass(frozen=True, slots=True)
class Events(FromPlain):
    """Events, oldest first, and the number after which the next call continues."""

    events: tuple[Event, ...]
    next: int


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).isoformat(" ", "seconds")
