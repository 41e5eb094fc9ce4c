"""The replicas of one backend as a router sees them, and which of them gets the next request.

Problem: a router may know a thousand replicas, most of them full or set aside, and must not look through them
for each request. Choice: those that have room stand in a list of their own, from which one is drawn in
constant time; a replica leaves it when it fills up, by swapping places with the last, and comes back with
the first answer. Those set aside for a while wait in a heap.

A replica in the router's own process costs no hop, so it is preferred, but not at any price: where it has
more than twice as much to do as another, and `NEAR_LEAD` more, the other is asked. One that joins a backend
in service is the next to be asked, so that it need not wait to be drawn by chance.

One that is full with other processes' requests says so when it is asked, and in its answers. Then it gets
only what finds no room anywhere else, one request at a time, to wait in line there
(`daskserve.data.replica.slots`), until it tells of room or has told nothing for `REPORT_S`.

Pure: time and chance are arguments.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from daskserve.data.caller.routing import choose
from daskserve.types import ActorAddress, Load, ReplicaTag, WorkerAddress

#: Reports older than this say nothing any more.
REPORT_S = 1.0
#: How much more, and how many times as much, a replica of this process may have to do as another one.
NEAR_LEAD = 4
NEAR_FACTOR = 2
#: How long a replica is left alone in whose line there was no place, or none that came to anything in time.
AGAIN_S = 0.02


class ReplicaEntry:
    """One replica, and what this process has in flight there."""

    __slots__ = (
        "address",
        "concurrency",
        "in_flight",
        "is_aside",
        "is_full",
        "is_in_line",
        "not_before",
        "peers",
        "place",
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
        #: Whether it said last that it is full, and whether a request of this process waits in line there.
        self.is_full = False
        self.is_in_line = False
        #: Where it stands while it has room, near or far; None once the replica is not used any more.
        self.peers: list[ReplicaEntry] | None = None
        #: Its place there, or among those that are full; -1 while it is to get nothing.
        self.place = -1

    def score(self, now: float) -> float:
        """Return how much the replica has to do, as far as is known here."""
        if self.reported > self.in_flight and now - self.reported_at < REPORT_S:
            return self.reported
        return self.in_flight


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
        self._full: list[ReplicaEntry] = []
        self._newcomers: deque[ReplicaEntry] = deque()
        self._aside: list[tuple[float, int, ReplicaEntry]] = []
        self._numbers = itertools.count()
        #: How many requests of this process the replicas have, those no longer in use included, and how many
        #: of these wait in line.
        self.in_flight = 0
        self.in_line = 0

    def __repr__(self) -> str:
        return " ".join(f"{each.tag}={each.in_flight}/{each.concurrency}" for each in self._entries.values())

    @property
    def is_empty(self) -> bool:
        """Whether there is no replica at all, with or without room."""
        return not self._entries

    @property
    def size(self) -> int:
        """How many replicas there are, with or without room."""
        return len(self._entries)

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
        self._full.clear()
        self._entries = {entry.tag: entry for entry in entries}
        for entry in self._entries.values():
            entry.peers = self._near if self._is_local(entry.address) else self._far
            self._admit(entry)

    def take(self, now: float, rng: random.Random) -> ReplicaEntry | None:
        """Return the replica for a request, which counts as in flight from now on; None if there is none.

        If none has room, it is one that is full: the request is then in line there (``is_in_line``).
        """
        if self._aside and self._aside[0][0] <= now:
            self._readmit(now)
        if self._full:
            # One of them will do: whoever looks often soon comes by all of them.
            entry = self._full[int(rng.random() * len(self._full))]
            if now - entry.reported_at >= REPORT_S:
                self._mark(entry, is_full=False)
        near, far = self._near, self._far
        if near:
            entry = near[0] if len(near) == 1 else choose(near, now, rng)
            if far and (score := entry.score(now)) > NEAR_LEAD:
                other = self._newcomer() or far[int(rng.random() * len(far))]
                if score > NEAR_FACTOR * other.score(now) + NEAR_LEAD:
                    entry = other
        elif far:
            entry = (self._newcomers and self._newcomer()) or (
                far[0] if len(far) == 1 else choose(far, now, rng)
            )
        elif self._full:
            entry = choose(self._full, now, rng)
            entry.is_in_line = True
            self.in_line += 1
        else:
            return None
        self.in_flight += 1
        entry.in_flight += 1
        if entry.is_in_line or entry.in_flight >= entry.concurrency:
            self._dismiss(entry)
        return entry

    def leave_line(self, entry: ReplicaEntry) -> None:
        """Note that the request in line at a replica has its slot, or is there no more."""
        if entry.is_in_line:
            entry.is_in_line = False
            self.in_line -= 1
            self._admit(entry)

    def give_back(self, entry: ReplicaEntry) -> None:
        """Note that a request has ended."""
        self.in_flight -= 1
        entry.in_flight -= 1
        if entry.place < 0:
            self._admit(entry)

    def put_first(self, entry: ReplicaEntry) -> None:
        """Have a replica, if it is elsewhere, asked next, as one that joins is."""
        if entry.peers is self._far:
            self._newcomers.appendleft(entry)

    def report(self, entry: ReplicaEntry, load: Load, now: float) -> None:
        """Take note of what a replica says of itself."""
        entry.reported = load.ongoing + load.queued
        entry.reported_at = now
        is_full = load.ongoing >= entry.concurrency
        if is_full is not entry.is_full:
            self._mark(entry, is_full=is_full)

    def note_busy(self, entry: ReplicaEntry, ongoing: int, now: float, *, was_in_line: bool) -> None:
        """Note that a replica refused a request, at once or after it had waited in line there."""
        self.report(entry, Load(max(ongoing, entry.concurrency)), now)
        if was_in_line:
            self.set_aside(entry, now + AGAIN_S)

    def _mark(self, entry: ReplicaEntry, *, is_full: bool) -> None:
        if entry.place < 0:
            entry.is_full = is_full
        else:
            self._dismiss(entry)
            entry.is_full = is_full
            self._admit(entry)

    def set_aside(self, entry: ReplicaEntry, until: float) -> None:
        """Give a replica no request before that time."""
        entry.is_aside = True
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
            if entry.place >= 0 and not entry.is_full:
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
        if entry.is_aside or entry.is_in_line or entry.peers is None or entry.in_flight >= entry.concurrency:
            return
        peers = self._full if entry.is_full else entry.peers
        entry.place = len(peers)
        peers.append(entry)

    def _dismiss(self, entry: ReplicaEntry) -> None:
        peers = self._full if entry.is_full else entry.peers
        assert peers is not None
        last = peers.pop()
        if last is not entry:
            peers[entry.place] = last
            last.place = entry.place
        entry.place = -1
