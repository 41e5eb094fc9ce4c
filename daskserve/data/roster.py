"""The replicas of one backend as a router sees them, and which of them gets the next request.

Problem: a router may know a thousand replicas, most of them full or set aside, and must not look through them
for each request. Choice: those that have room stand in a list of their own, from which one is drawn in
constant time; a replica leaves it when it fills up, by swapping places with the last, and comes back with
the first answer. Those set aside for a while wait in a heap.

A replica in the router's own process costs no hop, so it is preferred, but not at any price: where it has
more than twice as much to do as another, and `NEAR_LEAD` more, the other is asked. One that joins a backend
in service is the next to be asked, so that it need not wait to be drawn by chance.

One that is full with other processes' requests says so when it is asked, and nobody tells when it has room
again. So it is asked again after a moment, and after twice as long each time that it still runs the same
requests: several processes that wait for one replica would else keep it busy with refusing them. Chance keeps
them apart, and where requests are short nobody waits for long, or others would always be there first.

Pure: time and chance are arguments.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from daskserve.data.routing import choose
from daskserve.errors import ReplicaBusyError
from daskserve.types import ActorAddress, Load, ReplicaTag, WorkerAddress

#: Reports older than this say nothing any more.
REPORT_S = 1.0
#: How much more, and how many times as much, a replica of this process may have to do as another one.
NEAR_LEAD = 4
NEAR_FACTOR = 2
#: How long a replica that has just become full is left alone at the most, and one that stays full.
BUSY_S = 0.005
LONG_BUSY_S = 0.08


class ReplicaEntry:
    """One replica, and what this process has in flight there."""

    __slots__ = (
        "address",
        "busy_s",
        "concurrency",
        "handled",
        "in_flight",
        "is_aside",
        "is_busy",
        "not_before",
        "peers",
        "place",
        "refused_at",
        "reported",
        "reported_at",
        "tag",
    )

    def __init__(self, tag: ReplicaTag, address: ActorAddress) -> None:
        self.tag = tag
        self.address = address
        self.concurrency = 1
        self.in_flight = 0
        self.reported = 0
        self.reported_at = -REPORT_S
        self.is_aside = False
        self.not_before = 0.0
        #: Whether it is aside only because it was full.
        self.is_busy = False
        #: When it said so last, how many requests it had begun by then, and how long it was to be left alone.
        self.refused_at = -REPORT_S
        self.handled = 0
        self.busy_s = 0.0
        #: Where it stands while it has room, near or far; None once the replica is not used any more.
        self.peers: list[ReplicaEntry] | None = None
        #: Its place there; -1 while it has no room.
        self.place = -1

    def score(self, now: float) -> float:
        """Return how much the replica has to do, as far as is known here."""
        if self.reported > self.in_flight and now - self.reported_at < REPORT_S:
            return self.reported
        return self.in_flight

    def report(self, load: Load, now: float) -> None:
        """Take note of what the replica says of itself."""
        self.reported = load.ongoing + load.queued
        self.reported_at = now


class Roster:
    """The replicas of one backend.

    Parameters
    ----------
    is_local : callable
        Whether the replica at an address lives in this process.
    """

    def __init__(self, is_local: Callable[[ActorAddress], bool]) -> None:
        self._is_local = is_local
        self._entries: dict[ReplicaTag, ReplicaEntry] = {}
        self._near: list[ReplicaEntry] = []
        self._far: list[ReplicaEntry] = []
        self._newcomers: deque[ReplicaEntry] = deque()
        self._aside: list[tuple[float, int, ReplicaEntry]] = []
        self._numbers = itertools.count()
        #: How many requests of this process the replicas have, those no longer in use included.
        self.in_flight = 0

    def __repr__(self) -> str:
        return " ".join(f"{each.tag}={each.in_flight}/{each.concurrency}" for each in self._entries.values())

    @property
    def is_empty(self) -> bool:
        """Whether there is no replica at all, with or without room."""
        return not self._entries

    def update(
        self,
        published: Mapping[ReplicaTag, tuple[WorkerAddress, int]],
        concurrency: int,
        name_of: Callable[[ReplicaTag], str],
    ) -> None:
        """Use these replicas, each with its worker and incarnation, from now on."""
        known = self._entries
        newcomers: list[ReplicaEntry] = []
        entries: list[ReplicaEntry] = []
        for tag, (worker, incarnation) in published.items():
            entry = known.get(tag)
            if entry is None or entry.address.worker != worker or entry.address.incarnation != incarnation:
                entry = ReplicaEntry(tag, ActorAddress(name_of(tag), worker, incarnation))
                newcomers.append(entry)
            entry.concurrency = concurrency
            entries.append(entry)
        self._use(entries)
        self._newcomers = deque(each for each in self._newcomers if each.peers is self._far)
        if len(newcomers) < len(entries):
            self._newcomers.extend(each for each in newcomers if each.peers is self._far)

    def forget_worker(self, worker: WorkerAddress) -> None:
        """Stop using the replicas of a worker."""
        self._use([each for each in self._entries.values() if each.address.worker != worker])

    def _use(self, entries: Iterable[ReplicaEntry]) -> None:
        for entry in self._entries.values():
            entry.peers = None
            entry.place = -1
        self._near.clear()
        self._far.clear()
        self._entries = {entry.tag: entry for entry in entries}
        for entry in self._entries.values():
            entry.peers = self._near if self._is_local(entry.address) else self._far
            self._admit(entry)

    def take(self, now: float, rng: random.Random) -> ReplicaEntry | None:
        """Return the replica for a request, which counts as in flight from now on; None if none has room."""
        if self._aside and self._aside[0][0] <= now:
            self._readmit(now)
        near, far = self._near, self._far
        if near:
            entry = choose(near, now, rng)
            score = entry.score(now)
            if score > NEAR_LEAD and far:
                other = self._newcomer() or far[int(rng.random() * len(far))]
                if score > NEAR_FACTOR * other.score(now) + NEAR_LEAD:
                    entry = other
        elif far:
            entry = self._newcomer() or choose(far, now, rng)
        else:
            return None
        self.in_flight += 1
        entry.in_flight += 1
        if entry.in_flight >= entry.concurrency:
            self._dismiss(entry)
        return entry

    def give_back(self, entry: ReplicaEntry) -> None:
        """Note that a request has ended."""
        self.in_flight -= 1
        entry.in_flight -= 1
        if entry.place < 0:
            self._admit(entry)

    def note_busy(self, entry: ReplicaEntry, error: ReplicaBusyError, now: float, rng: random.Random) -> None:
        """Leave a replica alone that was full, until it has room again as far as that can be known."""
        is_first = (
            entry.reported < entry.concurrency
            or entry.reported_at != entry.refused_at
            or entry.handled != error.handled  # it had room, and somebody else was there first
            or now - entry.refused_at >= REPORT_S
        )
        # As many as there are slots at least, so that any later report of fewer tells of room.
        entry.report(Load(max(error.ongoing, entry.concurrency)), now)
        entry.refused_at, entry.handled = now, error.handled
        if entry.is_aside:
            return  # sent before this was known
        entry.busy_s = BUSY_S if is_first else min(2 * entry.busy_s, LONG_BUSY_S)
        self.set_aside(entry, now + entry.busy_s * (1 - rng.random() / 2))
        entry.is_busy = True

    def set_aside(self, entry: ReplicaEntry, until: float) -> None:
        """Give a replica no request before that time."""
        entry.is_aside = True
        entry.is_busy = False
        entry.not_before = max(until, entry.not_before)
        heapq.heappush(self._aside, (until, next(self._numbers), entry))
        if entry.place >= 0:
            self._dismiss(entry)

    def next_return(self) -> float | None:
        """Return when the first of those that are set aside may be used again; None if there are none."""
        while self._aside and self._aside[0][2].peers is None:
            heapq.heappop(self._aside)
        return self._aside[0][0] if self._aside else None

    def _newcomer(self) -> ReplicaEntry | None:
        while self._newcomers:
            entry = self._newcomers.popleft()
            if entry.place >= 0:
                return entry
        return None

    def _readmit(self, now: float) -> None:
        while self._aside and self._aside[0][0] <= now:
            _, _, entry = heapq.heappop(self._aside)
            if entry.is_aside and entry.not_before <= now:
                entry.is_aside = False
                if entry.place < 0:
                    self._admit(entry)

    def _admit(self, entry: ReplicaEntry) -> None:
        if entry.peers is not None and entry.in_flight < entry.concurrency:
            if entry.is_aside:
                if not entry.is_busy or entry.reported >= entry.concurrency:
                    return
                entry.is_aside = False  # an answer told of room
                entry.not_before = 0.0
            entry.place = len(entry.peers)
            entry.peers.append(entry)

    @staticmethod
    def _dismiss(entry: ReplicaEntry) -> None:
        assert entry.peers is not None
        last = entry.peers.pop()
        if last is not entry:
            entry.peers[entry.place] = last
            last.place = entry.place
        entry.place = -1
