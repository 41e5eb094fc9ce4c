"""The faults of a chaos run and their times, which depend only on the seed.

A run is a sequence of rounds. Each round causes one or two faults, and ends when everything runs again. The
first rounds use every kind of fault once, in random order; then another random order follows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: The share of rounds that cause two faults.
PAIRS_SHARE = 0.5
#: The machines that have workers, and the names of their workers.
SEATS = {"h1": ("h1a", "h1b"), "h2": ("h2a",), "h3": ("h3a",)}
HOSTS = tuple(SEATS)
WORKERS = tuple(worker for seats in SEATS.values() for worker in seats)
#: The roles by which a fault selects a worker when it begins.
ROLES = ("proxy", "controller")
#: The receivers of SIGTERM: a worker's process, its nanny (as in a container), both with all of their
#: processes (as by systemd), or the processes of its replicas.
SIGNALLED = ("worker", "nanny", "service", "replicas")


@dataclass(frozen=True)
class Kind:
    """A kind of fault: its possible targets, and its possible durations in seconds."""

    targets: Sequence[str] = ("",)
    lasts_s: tuple[float, float] = (0.0, 0.0)


_PAIRS = tuple(f"{one} {other}" for one in HOSTS for other in HOSTS if one != other)
_BOTH = tuple(f"{pair} both" for pair in _PAIRS[: len(_PAIRS) // 2])

KINDS: dict[str, Kind] = {
    "kill worker": Kind((*ROLES, *WORKERS)),
    "kill host": Kind(HOSTS, (2.0, 14.0)),
    "stop worker": Kind((*ROLES, *WORKERS), (6.0, 9.0)),
    "cut": Kind((*_PAIRS, *_BOTH), (8.0, 12.0)),
    "cut off host": Kind(HOSTS, (8.0, 14.0)),
    "retire": Kind((*ROLES, *WORKERS)),
    "sigterm": Kind(tuple(f"{whom} {seat}" for whom in SIGNALLED for seat in (*ROLES, *WORKERS))),
    "sigterm host": Kind(HOSTS),
    "sigterm scheduler": Kind(lasts_s=(1.0, 10.0)),
    "freeze scheduler": Kind(lasts_s=(3.0, 8.0)),
    "kill scheduler": Kind(lasts_s=(1.0, 10.0)),
    "poison": Kind(),
    "redeploy": Kind(),
    "remove store": Kind(lasts_s=(1.0, 3.0)),
}


@dataclass(frozen=True)
class Fault:
    """One fault of a round: when it begins, relative to the round's beginning, and how long it lasts."""

    kind: str
    target: str
    at_s: float
    lasts_s: float

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:g} s" if self.lasts_s else ""
        return " ".join(filter(None, (self.kind, self.target))) + lasts


Round = tuple[Fault, ...]


def rounds(
    seed: int, kinds: Sequence[str] = tuple(KINDS), *, pairs_share: float = PAIRS_SHARE
) -> Iterator[Round]:
    """Yield rounds endlessly; equal arguments give equal rounds."""
    rng = random.Random(seed)
    left: list[str] = []
    while True:
        if not left:
            left = rng.sample(kinds, len(kinds))
        first = _draw(rng, left.pop(), at_s=0.0)
        others = [kind for kind in kinds if _go_together(kind, first.kind)]
        if others and rng.random() < pairs_share:
            kind = rng.choice(others)
            if kind in left:
                left.remove(kind)
            yield first, _draw(rng, kind, at_s=round(rng.uniform(0.0, 2.0), 2))
        else:
            yield (first,)


def _go_together(one: str, other: str) -> bool:
    # Two faults of one kind may select the same worker, and there is only one scheduler.
    return one != other and not (one.endswith("scheduler") and other.endswith("scheduler"))


def _draw(rng: random.Random, kind: str, at_s: float) -> Fault:
    drawn = KINDS[kind]
    return Fault(kind, rng.choice(drawn.targets), at_s, round(rng.uniform(*drawn.lasts_s), 1))
