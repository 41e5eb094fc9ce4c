"""The requests of both versions in the current step of each rollout, as reported by routers. Pure.

Each router starts counting when it learns of a step, and reports its totals once a second. A report that
arrives twice therefore counts once, and a new controller has all counts within a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskserve.common.types import BackendTag
from daskserve.control.observed.rollout_evidence import Evidence, VersionCounts

#: Maximum number of routers that are counted for one step.
MAX_ROUTERS = 10_000
#: Maximum number of steps of one backend whose counts are kept.
KEPT_STEPS = 4
#: Maximum number of shadowed requests with different answers that are kept.
KEPT_DIFFERENCES = 10


@dataclass(slots=True)
class _Step:
    #: The totals of the new and of the old version, by router.
    routers: dict[str, tuple[VersionCounts, VersionCounts]] = field(default_factory=dict)
    #: The sums over all routers.
    new: VersionCounts = field(default_factory=VersionCounts)
    old: VersionCounts = field(default_factory=VersionCounts)
    polls: dict[int, tuple[int, int, float, float]] = field(default_factory=dict)
    troubles: dict[int, str] = field(default_factory=dict)

    def report(self, router: str, new: VersionCounts, old: VersionCounts) -> None:
        if router not in self.routers and len(self.routers) >= MAX_ROUTERS:
            return
        new_before, old_before = self.routers.get(router, (VersionCounts(), VersionCounts()))
        self.new, self.old = self.new + new - new_before, self.old + old - old_before
        self.routers[router] = new, old


@dataclass(slots=True)
class Shadowed:
    """The compared answers of a rollout: their number, how many differ, and the last differences.

    ``failed`` is the number of answers that could not be compared, ``trouble`` the last reason.
    """

    compared: int = 0
    different: int = 0
    samples: list[str] = field(default_factory=list)
    failed: int = 0
    trouble: str = ""

    @property
    def failed_text(self) -> str:
        """The number of answers that could not be compared, with the reason, as text; empty if there are
        none."""
        return f"{self.failed} could not be compared: {self.trouble}" if self.failed else ""


@dataclass(slots=True)
class _Answers:
    key: str
    routers: dict[str, Shadowed] = field(default_factory=dict)


class RolloutCounts:
    """The routers' counts for all rollouts; see the module."""

    def __init__(self) -> None:
        #: The steps of each backend, by the step's key.
        self._steps: dict[BackendTag, dict[str, _Step]] = {}
        self._answers: dict[BackendTag, _Answers] = {}

    def report(self, router: str, versions: Mapping[BackendTag, Mapping[str, Any]]) -> None:
        """Record a router's totals, by backend."""
        for tag, counted in versions.items():
            step = self._of(tag, str(counted["key"]))
            step.report(router, _counts(counted["new"]), _counts(counted["old"]))
            if shadowed := counted.get("shadowed"):
                self._compared(router, tag, _rollout_of(str(counted["key"])), shadowed)

    def _compared(self, router: str, tag: BackendTag, key: str, found: Sequence[Any]) -> None:
        answers = self._answers.get(tag)
        if answers is None or answers.key != key:
            answers = self._answers[tag] = _Answers(key)
        if router in answers.routers or len(answers.routers) < MAX_ROUTERS:
            compared, different, samples, failed, trouble = found
            kept = [str(each) for each in samples][-KEPT_DIFFERENCES:]
            answers.routers[router] = Shadowed(int(compared), int(different), kept, int(failed), str(trouble))

    def _of(self, tag: BackendTag, key: str) -> _Step:
        """Return the counts of a step. A router may still report an earlier step than the current one."""
        steps = self._steps.setdefault(tag, {})
        if key not in steps and len(steps) >= KEPT_STEPS:
            del steps[next(iter(steps))]
        return steps.setdefault(key, _Step())

    def polled(self, tag: BackendTag, key: str, number: int, new: float, old: float, *, worse: bool) -> None:
        """Record a comparison of the values of an expression for both versions."""
        step = self._of(tag, key)
        more, less, _, _ = step.polls.get(number, (0, 0, 0.0, 0.0))
        step.polls[number] = (more + worse, less + (not worse), new, old)
        step.troubles.pop(number, None)

    def troubled(self, tag: BackendTag, key: str, number: int, why: str) -> None:
        """Record why a comparison failed."""
        self._of(tag, key).troubles[number] = why

    def evidence(self, tag: BackendTag, key: str) -> Evidence:
        """Return the known counts of a step."""
        step = self._steps.get(tag, {}).get(key) or _Step()
        answers = self.shadowed(tag, _rollout_of(key))
        polls, troubles = dict(step.polls), dict(step.troubles)
        return Evidence(step.new, step.old, polls, troubles, answers.compared, answers.failed_text)

    def shadowed(self, tag: BackendTag, rollout_id: str) -> Shadowed:
        """Return the compared answers of a rollout."""
        answers = self._answers.get(tag)
        found = Shadowed()
        for each in answers.routers.values() if answers is not None and answers.key == rollout_id else ():
            found.compared += each.compared
            found.different += each.different
            found.samples += each.samples
            found.failed += each.failed
            found.trouble = each.trouble or found.trouble
        found.samples = found.samples[-KEPT_DIFFERENCES:]
        return found

    def forget(self, tag: BackendTag) -> None:
        """Drop the counts of a backend whose rollout has ended."""
        self._steps.pop(tag, None)
        self._answers.pop(tag, None)


def _rollout_of(key: str) -> str:
    """Return the rollout to which a step's key belongs."""
    return key.partition("/")[0]


def _counts(found: Sequence[Any]) -> VersionCounts:
    requests, failed, latency_counts = found
    return VersionCounts(int(requests), int(failed), tuple(int(each) for each in latency_counts))
