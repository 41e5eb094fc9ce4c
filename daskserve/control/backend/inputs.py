"""The inputs and the result of one step of a backend. Pure."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from daskserve.common.copying import replace
from daskserve.common.types import ReplicaState, WorkerAddress
from daskserve.control.backend.actions import Action
from daskserve.control.observed.observed import DeadReplica, Notes, Observed
from daskserve.control.records.records import BackendRecord, Change, ReplicaRecord
from daskserve.control.records.state import State


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step other than the backend.

    Attributes
    ----------
    seed : int
        Seed for the names of new replicas.
    incarnation : int
        The last incarnation number in use.
    wall : float
        Seconds since the epoch, for records and for people.
    undone : dict
        Changes of other backends that will be written in the same transaction.
    """

    state: State
    observed: Observed
    now: float
    seed: int
    incarnation: int
    avoid: Collection[WorkerAddress] = ()
    wall: float = 0.0
    undone: Change = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """The change to write, the notes to apply once it is written, and the actions that follow.

    Attributes
    ----------
    wake_at : float or None
        When the next step is due at the latest.
    incarnation : int
        The last incarnation number in use, including those of this step.
    messages : list of str
        Lines for the log.
    kept : dict
        The notes about the replicas of an old version during a rollout, by their key.
    causes : dict
        Why replicas that should run have ended, by the key of their record. A key with ``leaving/`` instead
        of the kind has the reason why a replica leaves its worker.
    """

    change: Change = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    actions: list[Action] = field(default_factory=list)
    wake_at: float | None = None
    incarnation: int = 0
    messages: list[str] = field(default_factory=list)
    kept: dict[str, Notes] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)

    def is_own(self, backend: BackendRecord) -> bool:
        """Return whether the step changes only the backend and its replicas, and keeps the backend."""
        return all(
            key.startswith(("replica/", "deaths/")) or (key == backend.key and record is not None)
            for key, record in self.change.items()
        )

    def note_death(self, replica: ReplicaRecord, death: DeadReplica) -> None:
        """Record why a replica that should have kept running has ended."""
        self.notes.dead += (replace(death, version=replica.version),)
        self.causes[replica.key] = death.reason

    def wake(self, at: float) -> None:
        """Schedule the next step for no later than this time."""
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)


def unplaced(replicas: Iterable[ReplicaRecord]) -> list[ReplicaRecord]:
    """Return the replicas that wait for workers."""
    return [each for each in replicas if each.state is ReplicaState.SHOULD_START]


def replica_tag(backend: str, seed: int, number: int) -> str:
    """Return a new replica's tag: ``backend#`` and six letters, as the classic system names them."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=6).digest()
    letters = "".join(string.ascii_letters[byte % len(string.ascii_letters)] for byte in digest)
    return f"{backend}#{letters}"
