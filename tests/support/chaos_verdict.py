"""Finds the violations of a chaos run, given its requests and its faults.

All times are on one monotonic clock. Processes are identified by their ids, and proxies by the addresses of
their machines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

#: Requests that must run exactly once.
ONCE = ("POST", "call")
#: Requests that are not retried if their replica is lost.
NOT_REPEATED = (*ONCE, "websocket")

#: Time until a restarted worker holds actors, while all others restart as well.
START_S = 6.0
#: Time until the silent loss of a machine or a route is detected, and time until a stopped process is
#: detected.
LOST_S, STOPPED_S = 7.5, 5.0
#: Time until requests are answered again after the death of a process, and after a fault that clients should
#: not notice.
DEAD_S, UNFELT_S = 1.0, 0.5
#: Time until a proxy that was cut off has applied all changes.
NEWS_S = 2.0
#: Time between two answers of one kind without faults: a request, a pause, and a margin for a busy machine.
QUIET_S = 1.5


@dataclass(frozen=True)
class Sample:
    """One request of the load."""

    kind: str
    id: str
    began: float
    ended: float
    #: "ok", "going away" for a WebSocket whose client should connect again, "cut short" after the response
    #: had begun, or the error.
    outcome: str
    #: The address of the machine of the proxy that got the request; empty for calls by handle.
    proxy: str = ""
    version: int = -1
    #: How a response was cut short.
    detail: str = ""

    @property
    def is_good(self) -> bool:
        return self.outcome in ("ok", "going away")


@dataclass(frozen=True)
class Damage:
    """A fault that has occurred: when it ended, and the processes and proxies that it affected."""

    kind: str
    name: str
    round: int
    began: float
    ended: float
    #: The processes, and the machines of the proxies, that were affected.
    pids: frozenset[int] = frozenset()
    proxies: frozenset[str] = frozenset()
    #: Whether no other proxy was left.
    hits_last_proxy: bool = False

    @property
    def label(self) -> str:
        """Its kind, and whether it affected a proxy."""
        if self.hits_last_proxy:
            return f"{self.kind} (the proxy)"
        return f"{self.kind} (a proxy)" if self.proxies else self.kind

    @property
    def silence_s(self) -> float:
        """How long clients may wait because of this fault."""
        return felt_s(self.kind, self.ended - self.began, hits_last_proxy=self.hits_last_proxy)


def felt_s(kind: str, lasts_s: float, *, hits_last_proxy: bool, grace_s: float = 10.0) -> float:
    """Return how long clients may notice a fault, including the return of the only address."""
    noticed = {
        "kill worker": DEAD_S,
        "poison": DEAD_S,
        "kill host": DEAD_S,
        "stop worker": STOPPED_S,
        "cut": LOST_S,
        "cut off host": LOST_S,
    }.get(kind, UNFELT_S)
    if not hits_last_proxy or noticed == UNFELT_S:
        return noticed
    # A worker restarts on its machine, or the proxy moves after its grace period.
    return noticed + min(lasts_s + START_S, grace_s + START_S / 2)


@dataclass(frozen=True)
class Stall:
    """A time during which this machine did not execute the program of the run."""

    at: float
    lasted_s: float


@dataclass
class Run:
    """The observations of a run."""

    samples: Sequence[Sample]
    damages: Sequence[Damage]
    #: The processes in which each request ran.
    ran: Mapping[str, Sequence[frozenset[int]]]
    #: When each version was acknowledged.
    acknowledged: Sequence[tuple[float, int]] = ()
    stalls: Sequence[Stall] = ()
    #: The faults that checks during the run have found.
    leftovers: Sequence[str] = ()
    #: When the run began: violations contain the seconds since then.
    origin: float = 0.0
    #: When the clients began to send without a pause; earlier requests only warm up the instance.
    load_began: float = 0.0


def violations(run: Run) -> list[str]:
    """Return the violations of a run, in words."""
    return [
        *_unexplained(run),
        *_not_once(run),
        *_lost_changes(run),
        *_too_long(run),
        *run.leftovers,
    ]


# ---- failures


def _unexplained(run: Run) -> Iterator[str]:
    for sample in run.samples:
        if not sample.is_good and not any(_explains(each, sample, run) for each in run.damages):
            ran = " and ".join(str(sorted(pids)) for pids in run.ran.get(sample.id, ())) or "no process"
            yield (
                f"no fault explains that {sample.kind} {sample.id} at {sample.began - run.origin:.2f} "
                f"by the proxy {sample.proxy or '(none)'} in {ran} "
                f"failed after {sample.ended - sample.began:.2f} s: {sample.outcome} {sample.detail}".rstrip()
            )


def _explains(damage: Damage, sample: Sample, run: Run) -> bool:
    """Return whether a request was in progress on a process or proxy that a fault affected."""
    if not _meets(damage, sample, run):
        return False
    if sample.proxy in damage.proxies:
        return True
    if not damage.pids:
        return False
    ran = run.ran.get(sample.id, ())
    is_there = any(pids & damage.pids for pids in ran)
    if sample.kind in NOT_REPEATED:
        # A request that no replica has recorded was lost on its way to a replica.
        return is_there or not ran
    if sample.outcome == "cut short":
        return is_there
    # A request is retried once. Each of two faults, and each process that one poisonous request has ended,
    # may have ended an attempt, even an attempt that no replica has recorded.
    hit = frozenset().union(*(each.pids for each in run.damages))
    noted = sum(bool(pids & hit) for pids in ran)
    others = [each for each in run.damages if each.pids and _meets(each, sample, run)]
    ended = [pids for each in others for pids in _ended_in_turn(each)]
    unnoted = sum(not any(pids & each for pids in ran) for each in ended)
    return noted + unnoted > 1


def _ended_in_turn(damage: Damage) -> list[frozenset[int]]:
    return [frozenset({pid}) for pid in damage.pids] if damage.kind == "poison" else [damage.pids]


def _meets(damage: Damage, sample: Sample, run: Run) -> bool:
    return sample.ended >= damage.began and sample.began <= _felt_until(run, damage)


def _not_once(run: Run) -> Iterator[str]:
    for sample in run.samples:
        if sample.kind in ONCE:
            times = len(run.ran.get(sample.id, ()))
            if times > 1 or (sample.is_good and times != 1):
                yield f"{sample.kind} {sample.id} was done {times} times, and ended with: {sample.outcome}"


def _lost_changes(run: Run) -> Iterator[str]:
    changes = sorted(run.acknowledged)
    for sample in run.samples:
        known = [version for at, version in changes if at < sample.began]
        is_old = sample.outcome == "ok" and known and sample.version < max(known)
        if is_old and not any(_cuts_off_news(each, sample, run) for each in run.damages):
            yield (
                f"{sample.kind} {sample.id} at {sample.began - run.origin:.2f} got version {sample.version}, "
                f"after {max(known)} was acknowledged"
            )


def _cuts_off_news(damage: Damage, sample: Sample, run: Run) -> bool:
    """Return whether a request reached a proxy that could not have applied a change yet."""
    until = damage.ended + NEWS_S + 2 * _stalled(run, damage.began, damage.ended + NEWS_S)
    return sample.proxy in damage.proxies and damage.began < sample.began < until


# ---- waits


def _too_long(run: Run) -> Iterator[str]:
    for silence in _silences(run):
        felt = [each for each in run.damages if _is_felt(run, each, silence)]
        allowed = QUIET_S + _felt_together_s(felt) + 2 * _stalled(run, silence.at, silence.until)
        if silence.lasted_s > allowed:
            names = " + ".join(f"round {each.round}: {each.name}" for each in felt) or "no fault"
            yield (
                f"no {silence.kind} was answered for {silence.lasted_s:.2f} s from "
                f"{silence.at - run.origin:.2f}, more than {allowed:.2f} s ({names})"
            )


def _felt_together_s(damages: Sequence[Damage]) -> float:
    """Return how long clients may notice several faults; without a scheduler, nothing lost is replaced."""
    away = [each.ended - each.began + START_S for each in damages if each.kind.endswith("scheduler")]
    is_something_lost = any(each.pids for each in damages)
    return sum(each.silence_s for each in damages) + (sum(away) if is_something_lost else 0.0)


@dataclass(frozen=True)
class Silence:
    """The time between two answers to one kind of request."""

    kind: str
    at: float
    until: float

    @property
    def lasted_s(self) -> float:
        return self.until - self.at


def _silences(run: Run) -> Iterator[Silence]:
    """Yield all silences, including those before the first and after the last answer."""
    samples = [each for each in run.samples if each.began >= run.load_began]
    if not samples:
        return
    first, last = min(each.began for each in samples), max(each.ended for each in samples)
    for kind in sorted({each.kind for each in samples}):
        ends = sorted(each.ended for each in samples if each.kind == kind and each.is_good)
        for at, until in pairwise([first, *ends, last]):
            yield Silence(kind, at, until)


def _is_felt(run: Run, damage: Damage, silence: Silence) -> bool:
    return damage.began < silence.until and silence.at < _felt_until(run, damage)


def _felt_until(run: Run, damage: Damage) -> float:
    until = damage.ended + damage.silence_s
    return until + 2 * _stalled(run, damage.began, until)


def _stalled(run: Run, since: float, until: float) -> float:
    """Return the longest stall of this machine within a time."""
    stalls = [each.lasted_s for each in run.stalls if each.at < until and since < each.at + each.lasted_s]
    return max(stalls, default=0.0)


# ---- the report


def report(run: Run) -> str:
    """Return the effects of a run as a table, with a row for each kind of round."""
    rounds: dict[int, list[Damage]] = defaultdict(list)
    for each in run.damages:
        rounds[each.round].append(each)
    names = {number: " + ".join(sorted(each.label for each in found)) for number, found in rounds.items()}
    begins = {number: min(each.began for each in found) for number, found in rounds.items()}
    counts, failed = Counter(names.values()), Counter[str]()
    for sample in run.samples:
        if not sample.is_good:
            guilty = [each.round for each in run.damages if _explains(each, sample, run)]
            failed[names[guilty[-1]] if guilty else "no fault"] += 1
    longest = dict.fromkeys([*counts, *failed], 0.0)
    for silence in _silences(run):
        name = names.get(_round_of(silence, begins), "no fault")
        longest[name] = max(longest.get(name, 0.0), silence.lasted_s)
    width = max(map(len, longest), default=5)
    lines = [f"{'fault':{width}}  times  failed requests  longest silence"]
    lines += [
        f"{name:{width}}  {counts[name]:5}  {failed[name]:15}  {longest[name]:13.2f} s"
        for name in sorted(longest, key=lambda name: ("+" in name, name))
    ]
    sent = Counter(each.kind for each in run.samples)
    lost = Counter(each.kind for each in run.samples if not each.is_good)
    lines += ["", *(f"{kind}: {sent[kind]} sent, {lost[kind]} failed" for kind in sorted(sent))]
    lines.append(f"changes acknowledged: {len(run.acknowledged)}")
    lines.append(f"longest stall of this machine: {max((s.lasted_s for s in run.stalls), default=0.0):.2f} s")
    return "\n".join(lines)


def _round_of(silence: Silence, begins: Mapping[int, float]) -> int | None:
    """Return the first round that began during a silence, or else the last round before the silence."""
    within = [number for number, began in begins.items() if silence.at <= began < silence.until]
    before = [number for number, began in begins.items() if began < silence.at]
    return min(within) if within else max(before, default=None)
