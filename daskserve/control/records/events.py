"""Events: what happened to an instance, and why. Each row of the store has the events of a transaction."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from daskserve.common.types import BackendTag, ReplicaTag
from daskserve.control.records.deaths import DeathsRecord


class EventKind(enum.StrEnum):
    """The kinds of events. The names are stable: programs filter by them."""

    DEPLOYING = "DEPLOYING"
    DEPLOYED = "DEPLOYED"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    SUPERSEDED = "SUPERSEDED"
    ROLLING_BACK = "ROLLING_BACK"
    ROLLED_BACK = "ROLLED_BACK"
    DELETING = "DELETING"
    DELETED = "DELETED"
    CONFIG_DECLARED = "CONFIG_DECLARED"
    BUILD_FAILED = "BUILD_FAILED"
    RESTARTING = "RESTARTING"
    SCALED = "SCALED"
    ROLLOUT_STEP = "ROLLOUT_STEP"
    ROLLOUT_PAUSED = "ROLLOUT_PAUSED"
    ROLLOUT_COMPLETED = "ROLLOUT_COMPLETED"
    ROLLOUT_TAKEN_BACK = "ROLLOUT_TAKEN_BACK"
    REPLICA_STARTED = "REPLICA_STARTED"
    REPLICA_FAILED = "REPLICA_FAILED"
    REPLICA_LOST = "REPLICA_LOST"
    REPLICA_STOPPING = "REPLICA_STOPPING"
    PROXY_STARTING = "PROXY_STARTING"
    PROXY_LOST = "PROXY_LOST"
    PROXY_LEAVING = "PROXY_LEAVING"
    MODEL_LOADED = "MODEL_LOADED"
    MODEL_FAILED = "MODEL_FAILED"
    MODEL_UNLOADED = "MODEL_UNLOADED"
    MODEL_DEFAULT_SET = "MODEL_DEFAULT_SET"
    ROUTER_FAILED = "ROUTER_FAILED"
    TRAFFIC_SET = "TRAFFIC_SET"
    TARGET_CAPACITY_SET = "TARGET_CAPACITY_SET"
    CONTROLLER_STARTED = "CONTROLLER_STARTED"


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes
    ----------
    kind : EventKind
    message : str
        A description in one line, with the cause.
    application : str
        The application that the event is about; empty if it is about none.
    deployment : str
        The tag of the deployment or backend; empty if the event is about more than one.
    subject : str
        The tag of the replica, or the name of the proxy or endpoint.
    by : str
        The program that caused the event; empty for decisions of the controller.
    """

    kind: str
    message: str
    application: str = ""
    deployment: BackendTag = ""
    subject: ReplicaTag = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class EventsRecord:
    """The events of one transaction.

    Attributes
    ----------
    number : int
        The number of the first event; the other events have the numbers after it. The upper bits are the
        epoch of the controller, so that two controllers never use the same number.
    at : float
        When they were written, in seconds since the epoch.
    """

    KIND: ClassVar[str] = "event"

    number: int
    at: float
    entries: Sequence[Sequence[str]] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.number}"

    @property
    def last(self) -> int:
        """The number of the row's last event."""
        return self.number + len(self.entries) - 1

    def to_plain(self, index: int) -> dict[str, Any]:
        """Return one event as plain values."""
        found = {"number": self.number + index, "at": self.at}
        return found | asdict(Event(*self.entries[index]))


class EventLog:
    """The rows of events, oldest first. Only `State.apply` changes it."""

    def __init__(self) -> None:
        self._rows: dict[int, EventsRecord] = {}
        self._numbers: list[int] = []
        #: The number of events in all rows.
        self.count = 0
        #: The last replicas of each backend that were lost or failed.
        self.deaths: dict[BackendTag, DeathsRecord] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[EventsRecord]:
        return (self._rows[number] for number in self._numbers)

    @property
    def last(self) -> int:
        """The number of the newest event; 0 if there is none."""
        return self._rows[self._numbers[-1]].last if self._numbers else 0

    def after(self, number: int) -> Iterator[EventsRecord]:
        """Return the rows that may hold events after a number, oldest first."""
        at = max(0, bisect.bisect_right(self._numbers, number) - 1)
        return (self._rows[each] for each in self._numbers[at:])

    def keep(self, row: EventsRecord) -> None:
        """Add a row."""
        self._rows[row.number] = row
        self.count += len(row.entries)
        if not self._numbers or row.number > self._numbers[-1]:
            self._numbers.append(row.number)
        else:
            bisect.insort(self._numbers, row.number)

    def forget(self, name: str) -> None:
        """Remove the row with a number."""
        number = int(name)
        row = self._rows.pop(number, None)
        if row is not None:
            self.count -= len(row.entries)
            del self._numbers[bisect.bisect_left(self._numbers, number)]
