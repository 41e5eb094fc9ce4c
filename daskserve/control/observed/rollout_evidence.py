"""Decides whether a new version is worse than the old one, given the requests of both. Pure.

Problem: the counts are tested every second, for minutes. A test that is meant to be run once would sooner or
later find a difference between equal versions. Choice: a bet against the hypothesis that the new version is
not worse, whose capital is a nonnegative supermartingale. By Ville's inequality, the capital reaches ``1 /
p`` with a probability of at most ``p``, regardless of how often it is tested.

Each request goes to the new version with the probability ``share``. If both versions are equally good, each
failed request was sent to the new version with that same probability. This holds for any error rate, even one
that changes over time. The factor by which the new version may be worse is unknown, so the capital is the
mean of several bets, each on a different factor.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from daskserve.common.formatting import counted, shown
from daskserve.options.rollout import DETECTS, Gate, percent_of
from daskserve.telemetry.histogram import latency_buckets_s

#: The factors that are bet on.
FACTORS: Sequence[float] = (1.5, 2, 3, 5, 10, 30, 100)
#: Maximum number of requests that a step may need.
MOST_REQUESTS = 10_000_000
#: The largest logarithm of the capital that is carried to the next step.
MOST_LOG = 100.0


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """The requests of one version: how many ended, how many of them failed, and their latencies."""

    requests: int = 0
    failed: int = 0
    latency_counts: Sequence[int] = ()

    def __add__(self, other: VersionCounts) -> VersionCounts:
        return self._plus(other, 1)

    def __sub__(self, other: VersionCounts) -> VersionCounts:
        return self._plus(other, -1)

    def _plus(self, other: VersionCounts, sign: int) -> VersionCounts:
        pairs = itertools.zip_longest(self.latency_counts, other.latency_counts, fillvalue=0)
        counts = tuple(one + sign * two for one, two in pairs)
        return VersionCounts(self.requests + sign * other.requests, self.failed + sign * other.failed, counts)

    def slower_than(self, bucket: int) -> int:
        """Return the number of requests in higher buckets."""
        return sum(self.latency_counts[bucket + 1 :])


@dataclass(frozen=True, slots=True)
class Evidence:
    """The requests of both versions at one step.

    Attributes
    ----------
    polls : dict
        How often the new version was worse, how often it was not, and the last two values, by the number of
        a gate with a PromQL expression.
    troubles : dict
        Why the last comparison failed, by the number of a gate with a PromQL expression.
    compared : int
        Number of compared answers of shadowed requests since the rollout began.
    not_compared : str
        How many answers could not be compared, and why; empty if there are none.
    """

    new: VersionCounts = VersionCounts()
    old: VersionCounts = VersionCounts()
    polls: Mapping[int, tuple[int, int, float, float]] = field(default_factory=dict)
    troubles: Mapping[int, str] = field(default_factory=dict)
    compared: int = 0
    not_compared: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one gate: whether it fails, and its numbers as text."""

    is_worse: bool
    text: str


def log_capital(new: int, old: int, share: float, tolerance: float) -> float:
    """Return the logarithm of the capital, given the number of events of the new and of the old version."""
    odds = share / (1 - share) * (1 + tolerance)
    bets = []
    for factor in FACTORS:
        won = math.log(factor * (1 + odds) / (1 + factor * odds))
        lost = math.log((1 + odds) / (1 + factor * odds))
        bets.append(new * won + old * lost)
    most = max(bets)
    return most + math.log(sum(math.exp(each - most) for each in bets) / len(bets))


def is_worse(new: int, old: int, share: float, tolerance: float, p: float, carried: float = 0.0) -> bool:
    """Return whether chance cannot explain the new version's events, at a false alarm rate of ``p``.

    ``carried`` are the winnings of earlier steps; see `carried_on`.
    """
    if not 0 < share < 1 or not new:
        return False
    return math.log1p(carried) + log_capital(new, old, share, tolerance) >= -math.log(p)


def carried_on(gate: Gate, number: int, evidence: Evidence, share: float, carried: float) -> float:
    """Return the winnings of a gate's bets that it carries to the next step.

    At each step, a new bet of the same size begins, and the earlier bets continue. This detects a version
    that is slightly worse at each step, and a version that is worse only at the last step.
    """
    if gate.metric == "latency":
        return 0.0  # each step may have another bound
    if not 0 < share < 1:
        return carried + 1
    if gate.metric == "prometheus":
        new, old = evidence.polls.get(number, (0, 0))[:2]
        share, tolerance = 0.5, 0.0
    else:
        new, old, tolerance = evidence.new.failed, evidence.old.failed, gate.tolerance
    return (carried + 1) * math.exp(min(log_capital(new, old, share, tolerance), MOST_LOG))


def least_polls(p: float) -> int:
    """Return how many comparisons it takes to detect a version that is always worse, given ``p``."""
    return next(n for n in range(1, 1000) if is_worse(n, 0, 0.5, 0.0, p))


def least_requests(gate: Gate, evidence: Evidence, share: float, p: float) -> int:
    """Return the number of requests of the new version after which a gate would have found a difference.

    The difference is ``detects`` of all requests, or the share that fails or is slow with the old version, if
    that is larger. The gate finds it even if the new version was lucky by three standard deviations.
    """
    if gate.metric == "prometheus" or not 0 < share < 1:
        return 0
    old, events = evidence.old, evidence.old.failed
    if gate.metric == "latency":
        events, p = old.slower_than(slow_bucket(gate, old)), p / len(latency_buckets_s())
    rate = events / old.requests if old.requests else 0.0
    increase = max(percent_of(gate.detects or DETECTS[gate.metric]) / 100, rate)

    def finds(requests: int) -> bool:
        more = requests * increase
        new, before = requests * rate + more - 3 * math.sqrt(more), requests * rate * (1 - share) / share
        return is_worse(max(0, round(new)), round(before), share, gate.tolerance, p)

    return bisect.bisect_left(range(MOST_REQUESTS), True, lo=1, key=finds)


def judge(
    gate: Gate,
    number: int,
    evidence: Evidence,
    share: float,
    p: float,
    for_s: float | None = None,
    carried: float = 0.0,
) -> Finding:
    """Return the finding of a gate; ``number`` is its index in the plan."""
    if gate.metric == "prometheus":
        return _polled(gate, number, evidence, p, carried)
    if gate.metric == "latency":
        return _slow(gate, evidence, share, p, for_s)
    new, old = evidence.new, evidence.old
    text = f"{_of(new.failed, new.requests)} failed, {_of(old.failed, old.requests, 'the old one')} did"
    worse = is_worse(new.failed, old.failed, share, gate.tolerance, p, carried)
    return Finding(worse, f"{text}{_within(for_s)}")


def _within(for_s: float | None) -> str:
    return "" if for_s is None else f", in {shown(round(for_s, 1))} s"


def _of(count: int, requests: int, whose: str = "the new version") -> str:
    percent = f" ({shown(round(100 * count / requests, 3))} %)" if requests else ""
    return f"{count} of {counted(requests, 'request')}{percent} of {whose}"


def slow_bucket(gate: Gate, old: VersionCounts) -> int:
    """Return the bucket above which a request is slow, from the gate's quantile of the old version."""
    limit, buckets = (1 - gate.quantile) * old.requests, len(latency_buckets_s())
    return next((n for n in range(buckets) if old.slower_than(n) <= limit), buckets - 1)


def _slow(gate: Gate, evidence: Evidence, share: float, p: float, for_s: float | None) -> Finding:
    new, old, buckets = evidence.new, evidence.old, len(latency_buckets_s())
    bucket = slow_bucket(gate, old)
    slow, slow_before = new.slower_than(bucket), old.slower_than(bucket)
    bound = f"{shown(latency_buckets_s()[bucket])} s"
    text = (
        f"{_of(slow, new.requests)} took longer than {bound}, "
        f"{_of(slow_before, old.requests, 'the old one')} did{_within(for_s)}"
    )
    # The bucket depends on the data, so the probability is divided among all buckets.
    worse = old.requests > 0 and is_worse(slow, slow_before, share, gate.tolerance, p / buckets)
    return Finding(worse, text)


def _polled(gate: Gate, number: int, evidence: Evidence, p: float, carried: float) -> Finding:
    trouble, polls = evidence.troubles.get(number, ""), evidence.polls.get(number)
    lately = f"; the last comparison failed: {trouble}" if trouble else ""
    if polls is None:
        return Finding(False, f"{gate.query} has not been compared yet{lately}")
    worse, not_worse, new, old = polls
    text = (
        f"{gate.query} was larger for the new version in {worse} of "
        f"{counted(worse + not_worse, 'comparison')}, last "
        f"{shown(new)} beside {shown(old)}{lately}"
    )
    return Finding(is_worse(worse, not_worse, 0.5, 0.0, p, carried), text)
