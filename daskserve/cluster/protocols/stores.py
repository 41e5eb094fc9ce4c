"""The records of an instance, and the place that keeps them.

Several clusters may use one place, and at most one of them owns an instance's records. `StoreOwnership` lists
the states of an instance, `TRANSITIONS` how they change. `daskserve.cluster.scheduler.owned_store` executes
them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class StoreOwnership(enum.StrEnum):
    """Whether an instance owns its records in the store."""

    #: The instance is starting, and writes nothing. Another instance may own the records, until this one
    #: serves.
    TRIAL = "trial"
    #: The instance owns the records, and has not written its changes from the trial yet.
    CLAIMED = "claimed"
    HELD = "held"
    #: Another cluster has taken the records over. The instance continues with its records in memory.
    TAKEN = "taken"
    #: Another cluster took the records over during the trial, so the start fails.
    REFUSED = "refused"
    #: The instance ends. The records are free, or belong to the previous owner again.
    RELEASED = "released"

    @property
    def is_ours(self) -> bool:
        """Whether the store refuses changes from other clusters."""
        return self in (StoreOwnership.CLAIMED, StoreOwnership.HELD)


class OwnershipEvent(enum.Enum):
    """An event that changes the ownership."""

    CLAIM = enum.auto()
    WRITE = enum.auto()
    OVERTAKEN = enum.auto()
    GIVEN_BACK = enum.auto()
    RELEASE = enum.auto()


#: All transitions; any other event does not change the ownership.
TRANSITIONS: Mapping[tuple[StoreOwnership, OwnershipEvent], StoreOwnership] = {
    (StoreOwnership.TRIAL, OwnershipEvent.CLAIM): StoreOwnership.CLAIMED,
    (StoreOwnership.TRIAL, OwnershipEvent.OVERTAKEN): StoreOwnership.REFUSED,
    (StoreOwnership.CLAIMED, OwnershipEvent.WRITE): StoreOwnership.HELD,
    (StoreOwnership.CLAIMED, OwnershipEvent.OVERTAKEN): StoreOwnership.TAKEN,
    (StoreOwnership.CLAIMED, OwnershipEvent.RELEASE): StoreOwnership.RELEASED,
    (StoreOwnership.HELD, OwnershipEvent.OVERTAKEN): StoreOwnership.TAKEN,
    (StoreOwnership.HELD, OwnershipEvent.RELEASE): StoreOwnership.RELEASED,
    (StoreOwnership.TAKEN, OwnershipEvent.GIVEN_BACK): StoreOwnership.CLAIMED,
}


def next_ownership(ownership: StoreOwnership, event: OwnershipEvent) -> StoreOwnership:
    """Return the ownership after an event."""
    return TRANSITIONS.get((ownership, event), ownership)


class Claim(NamedTuple):
    """The newest claim on an instance's records.

    Attributes
    ----------
    epoch : int
        Its number; 0 if there is none.
    owner : str or None
        The instance that made it; empty if it was released, None if an earlier version made it.
    """

    epoch: int
    owner: str | None


@dataclass(frozen=True, slots=True)
class StoreChange:
    """One transaction: records to write (bytes) and to remove (None).

    ``parcels`` are the digests of the parcels behind codes that are written, by the code's name. If the store
    is lost, a change with ``must_last`` fails, and any other change is kept in memory for `Store.rewrite`. A
    change with ``may_wait`` survives a power loss only once a later change without it is written.
    """

    records: Mapping[str, bytes | None] = field(default_factory=dict)
    parcels: Mapping[str, str] = field(default_factory=dict)
    must_last: bool = True
    may_wait: bool = False


class Store(Protocol):
    """The durable records of one instance."""

    async def load(self) -> Mapping[str, bytes]:
        """Return all records."""

    async def commit(self, epoch: int, change: StoreChange) -> None:
        """Write one transaction atomically; raise if ``epoch`` is not the newest.

        Raises
        ------
        StoreLostError
            The change must last, and the file or folder was moved or replaced, so that the next start would
            not find it.
        """

    async def rewrite(self, epoch: int, change: StoreChange, unreadable: Sequence[str] = ()) -> None:
        """Replace all records at the place that the store's URL names now, except ``unreadable`` ones."""

    def problems(self) -> Mapping[str, str]:
        """Return the records that could not be read, each with the reason and where it is kept.

        The problem ``store`` means that the store is lost, or that another cluster has taken it over.
        """

    @property
    def ownership(self) -> StoreOwnership:
        """Whether the instance owns its records, as far as this process knows."""

    def learn(self, condition: Mapping[str, Any]) -> None:
        """Remember the store's ``problems`` and ``hold``, as its owner reported them."""

    async def take_over(
        self, epoch: int, *, is_complete: bool, own: Sequence[str]
    ) -> Mapping[str, bytes | None] | None:
        """Take ownership of the records, now that the instance serves, and write the changes from the trial.

        Returns the previous owner's changes since the trial began, by key; None if it is too early to take
        ownership. Idempotent.

        Parameters
        ----------
        is_complete
            Whether all deployments run. If not, a live owner keeps the records.
        own
            Prefixes of the keys of records that describe the state of this cluster only.

        Raises
        ------
        StoreTakenError
            Another cluster has taken the records over since this instance began to start.
        """


class InstanceStore(Store, Protocol):
    """The store of an instance in the process that owns it and starts the instance's controllers."""

    async def open(self) -> None:
        """Open the store; must be called first. Idempotent.

        Raises a `ServeError` that names the location and the remedy; it is retryable if the cause may be
        temporary.
        """

    async def close(self) -> None:
        """Finish pending operations and close all files and threads. Idempotent."""

    async def newest_epoch(self) -> int:
        """Return the newest epoch of the instance; 0 if there is none."""

    async def claim_epoch(self) -> int:
        """Return the epoch of the next controller, the highest so far; commits with older ones now fail."""

    async def release(self, *, gives_back: bool = False) -> None:
        """Release the records when this instance ends, so that others need not wait for a timeout.

        Parameters
        ----------
        gives_back
            Whether the previous owner gets the records back, because the start of this instance failed.
        """
