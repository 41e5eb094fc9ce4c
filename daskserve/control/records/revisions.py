"""Revisions: the last versions of each application, as they were deployed."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from daskserve.common.types import BackendTag, GoalId


class RevisionState(enum.StrEnum):
    """The state of a revision."""

    #: The revision's change is in progress.
    DEPLOYING = "DEPLOYING"
    #: The revision is the current version.
    RUNNING = "RUNNING"
    #: A later revision replaced it, perhaps before it was complete.
    SUPERSEDED = "SUPERSEDED"
    #: Its change failed or was withdrawn; the previous revision kept running.
    FAILED = "FAILED"
    #: A rollback replaced it.
    ROLLED_BACK = "ROLLED_BACK"
    #: The application was deleted.
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class RevisionRecord:
    """One version of an application.

    Attributes
    ----------
    at, ran_at, ended_at : float
        When it was requested, when it was complete, and when it ended, in seconds since the epoch; 0 if that
        has not happened.
    by : str
        The program that requested it.
    source : str
        ``run``, ``file`` or ``rollback``.
    origin : dict
        The origin of a declared application: the name of the ``file`` and its ``version``.
    goal : str
        The goal of its change.
    request_id : str
        Id of the client's call, which distinguishes a retry from a second call.
    rollback_of : int
        The number of the revision that a rollback deployed again; 0 for other revisions.
    changes : list
        The differences from the previous revision: dicts with ``deployment``, ``what``, ``old`` and ``new``.
        Strings for people, without secrets.
    reason : str
        Why it failed, or who replaced it.
    spec : bytes
        The records of the application, as `daskserve.control.decisions.history.revisions` packs them.
    codes : dict
        The names of the codes of its deployments, by tag.
    config : bytes
        The declared configuration, packed; empty if a program deployed it.
    digests : dict
        Digests of the codes whose versions the user has named, because their names may not be unique.
    is_complete : bool
        Whether it can be deployed again: its code is kept, and it has run or is in progress.
    """

    KIND: ClassVar[str] = "revision"

    application: str
    number: int
    state: RevisionState
    at: float
    by: str = ""
    source: str = "run"
    origin: Mapping[str, str] = field(default_factory=dict)
    goal: GoalId = ""
    request_id: str = ""
    rollback_of: int = 0
    changes: Sequence[Mapping[str, str]] = field(default_factory=list)
    ran_at: float = 0.0
    ended_at: float = 0.0
    reason: str = ""
    spec: bytes = field(default=b"", repr=False)
    codes: Mapping[BackendTag, str] = field(default_factory=dict)
    config: bytes = field(default=b"", repr=False)
    digests: Mapping[BackendTag, str] = field(default_factory=dict)
    is_complete: bool = True

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.application}/{self.number}"

    def to_plain(self) -> dict[str, Any]:
        """Return the values that are shown to users."""
        return {
            "number": self.number,
            "state": self.state.value,
            "at": self.at,
            "ran_at": self.ran_at or None,
            "ended_at": self.ended_at or None,
            "by": self.by,
            "source": self.source,
            "origin": dict(self.origin),
            "rollback_of": self.rollback_of or None,
            "changes": [dict(each) for each in self.changes],
            "reason": self.reason,
            "can_return": self.is_complete,
        }


class Revisions:
    """The revisions of all applications. Only `State.apply` changes it."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int, RevisionRecord]] = {}
        #: How many revisions need a code, by its name.
        self._needing: Counter[str] = Counter()

    def __iter__(self) -> Iterator[RevisionRecord]:
        return (each for found in self._of.values() for each in found.values())

    @property
    def applications(self) -> Mapping[str, Mapping[int, RevisionRecord]]:
        """The revisions by application and number."""
        return self._of

    def of(self, application: str) -> list[RevisionRecord]:
        """Return the revisions of an application, oldest first."""
        found = self._of.get(application, {})
        return [found[number] for number in sorted(found)]

    def get(self, name: str) -> RevisionRecord | None:
        """Return the revision whose key ends with ``application/number``."""
        application, _, number = name.rpartition("/")
        return self._of.get(application, {}).get(int(number))

    def need(self, code: str) -> int:
        """Return how many revisions need a code."""
        return self._needing.get(code, 0)

    def keep(self, record: RevisionRecord) -> None:
        """Add a record."""
        self._of.setdefault(record.application, {})[record.number] = record
        if record.is_complete:
            self._needing.update(set(record.codes.values()))

    def forget(self, name: str) -> None:
        """Remove the record whose key ends with ``application/number``."""
        application, _, last = name.rpartition("/")
        number = int(last)
        found = self._of.get(application, {})
        record = found.pop(number, None)
        if not found:
            self._of.pop(application, None)
        if record is not None and record.is_complete:
            for code in set(record.codes.values()):
                self._needing[code] -= 1
                if not self._needing[code]:
                    del self._needing[code]
