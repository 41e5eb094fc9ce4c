"""The recorded state of a rollout, and the table of its states. Pure.

The state is part of the backend's record, so one transaction changes the spec and the traffic. A crash in the
middle of a step leaves either all of the step or nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from daskserve.common.copying import replace
from daskserve.errors import ServeError


class RolloutPhase(enum.StrEnum):
    """The state of a rollout."""

    #: The replicas of the current step start. The traffic is still that of the previous step.
    STARTING = "STARTING"
    #: The new version has the traffic of the step.
    SERVING = "SERVING"
    #: The rollout stays at its step until a user promotes or aborts it.
    PAUSED = "PAUSED"
    #: The new version has passed all steps. The old one stops.
    COMPLETED = "COMPLETED"
    #: A gate failed, or the new version did not start: the old one has all traffic.
    ROLLED_BACK = "ROLLED_BACK"
    #: A user aborted the rollout: the old version has all traffic.
    ABORTED = "ABORTED"

    @property
    def is_undone(self) -> bool:
        """Whether the old version has all traffic again."""
        return self in (RolloutPhase.ROLLED_BACK, RolloutPhase.ABORTED)


class RolloutEvent(enum.StrEnum):
    """The events of a rollout."""

    READY = "READY"
    #: The step has passed. Another step follows (NEXT), or none (LAST).
    NEXT = "NEXT"
    LAST = "LAST"
    PAUSE = "PAUSE"
    FAILED = "FAILED"
    ABORT = "ABORT"


class InvalidRolloutTransition(ServeError):
    """An event does not fit the state of a rollout: a bug in the controller."""


_ENDS: Mapping[RolloutEvent, RolloutPhase] = {
    RolloutEvent.LAST: RolloutPhase.COMPLETED,
    RolloutEvent.FAILED: RolloutPhase.ROLLED_BACK,
    RolloutEvent.ABORT: RolloutPhase.ABORTED,
}
TABLE: Mapping[RolloutPhase, Mapping[RolloutEvent, RolloutPhase]] = {
    RolloutPhase.STARTING: {
        RolloutEvent.READY: RolloutPhase.SERVING,
        RolloutEvent.PAUSE: RolloutPhase.PAUSED,
        **_ENDS,
    },
    RolloutPhase.SERVING: {
        RolloutEvent.NEXT: RolloutPhase.STARTING,
        RolloutEvent.PAUSE: RolloutPhase.PAUSED,
        **_ENDS,
    },
    RolloutPhase.PAUSED: {
        RolloutEvent.NEXT: RolloutPhase.STARTING,
        RolloutEvent.PAUSE: RolloutPhase.PAUSED,
        **_ENDS,
    },
}


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The progress of a rollout.

    Attributes
    ----------
    rollout_id : str
        Distinguishes it from others of the same backend.
    stable : dict
        The record of the old version's backend, as plain values; empty once the rollout has ended.
    names : tuple of str
        The names of the new and the old version.
    step : int
        The number of the step whose replicas start or run, from 0.
    served : int
        The number of the step whose traffic the new version has; -1 if it has none.
    since : float
        When the phase began, in seconds since the epoch.
    carried : tuple of float
        The winnings of each gate's bets at the steps before the served one.
    why : str
        Why it has ended, with the numbers; before the end, who paused or promoted it last.
    promoted_by : str
        Id of the call that promoted it last, which distinguishes a retry from a second call.
    """

    rollout_id: str
    names: tuple[str, str]
    phase: RolloutPhase = RolloutPhase.STARTING
    step: int = 0
    served: int = -1
    since: float = 0.0
    began_at: float = 0.0
    carried: tuple[float, ...] = ()
    why: str = ""
    promoted_by: str = ""
    stable: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> RolloutState:
        """Return the state from the plain values that `to_plain` returned."""
        tuples = {name: tuple(values[name]) for name in ("names", "carried")}
        return cls(**{**values, **tuples, "phase": RolloutPhase(values["phase"])})

    def to_plain(self) -> dict[str, Any]:
        """Return the state as plain values."""
        lists = {"names": list(self.names), "carried": list(self.carried)}
        return {**asdict(self), **lists, "phase": self.phase.value}

    @property
    def is_active(self) -> bool:
        """Whether both versions run."""
        return self.phase in TABLE

    @property
    def mark(self) -> str:
        """A value that differs between the phases of a rollout."""
        return f"{self.rollout_id}/{self.step}/{self.phase}"

    def moved(self, event: RolloutEvent, wall: float, why: str = "") -> RolloutState:
        """Return the state after an event."""
        phase = TABLE.get(self.phase, {}).get(event)
        if phase is None:
            raise InvalidRolloutTransition(f"A rollout that is {self.phase} cannot take {event}.")
        found = replace(self, phase=phase, since=wall, why=why)
        if event is RolloutEvent.READY:
            # Keep the name of the program that promoted the rollout to this step.
            found = replace(found, served=self.step, why=why or self.why)
        elif event is RolloutEvent.NEXT:
            found = replace(found, step=self.served + 1)
        if not found.is_active:
            found = replace(found, stable={})
        return found


def replicas_of_step(share: float, replicas: int, gang_size: int) -> int:
    """Return how many replicas a share of the traffic needs, in whole gangs, at least one."""
    gangs = math.ceil(round(share * replicas / gang_size, 9))
    return max(1, gangs) * gang_size
