"""Random schedules of a machine, which depend only on the machine's rules and a seed.

Problem: Hypothesis draws different schedules in each of its releases, and for each constant in any loaded
module. So a run of the suite could fail by chance, and pass when it was repeated. Choice: the arguments of
rules are drawn here, so that seed 60 is the same schedule everywhere.

A failing schedule can be shortened: steps are left out as long as it still fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

#: The number of steps of a schedule.
LEAST_STEPS, MOST_STEPS = 10, 45
#: How many of a machine's rules a schedule uses; fewer rules are combined more often.
SHARES = (1.0, 1.0, 0.7, 0.4)
#: How many shorter schedules are tried for a failing one.
MOST_TRIALS = 300


class Choice(Protocol):
    """The values that an argument may have."""

    def draw(self, rng: random.Random) -> Any: ...


def pick(rng: random.Random, values: Sequence[Any]) -> Any:
    """Return one of some values; `random.Random.choice` may return another one in another Python release."""
    return values[int(rng.random() * len(values))]


class OneOf:
    """One of some values; a value that is listed twice is twice as likely."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def draw(self, rng: random.Random) -> Any:
        return pick(rng, self._values)


class Between(OneOf):
    """A whole number between two bounds, both included."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__(*range(least, most + 1))


class Several:
    """A list of values that one choice draws."""

    def __init__(self, kind: Choice, least: int, most: int) -> None:
        self._kind, self._count = kind, Between(least, most)

    def draw(self, rng: random.Random) -> list[Any]:
        return [self._kind.draw(rng) for _ in range(self._count.draw(rng))]


@dataclass(frozen=True)
class Rule:
    """A kind of step: the arguments of a machine's method, and when it applies."""

    arguments: dict[str, Choice]
    is_first: bool = False
    when: Callable[[Any], bool] = lambda machine: True


def rule(
    *, when: Callable[[Any], bool] = lambda machine: True, **arguments: Choice
) -> Callable[[Function], Function]:
    """Make a method a step of schedules, while ``when`` holds."""
    return _marked(Rule(arguments, when=when))


def first(**arguments: Choice) -> Callable[[Function], Function]:
    """Make a method the first step of every schedule."""
    return _marked(Rule(arguments, is_first=True))


def _marked(found: Rule) -> Callable[[Function], Function]:
    def mark(function: Function) -> Function:
        function.rule = found  # type: ignore[attr-defined]
        return function

    return mark


class Machine:
    """A class with rules."""

    rules: ClassVar[dict[str, Rule]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: each.rule for name, each in vars(cls).items() if hasattr(each, "rule")}
        cls.rules = {**cls.rules, **own}

    def teardown(self) -> None:
        """Check what must hold at the end of a schedule, and close everything."""
        self.close()

    def close(self) -> None:
        """Close everything, after a step has failed."""


@dataclass(frozen=True)
class Taken:
    """A step with its arguments, shown as Python."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return (
            f"state.{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"
        )


@dataclass
class Schedule:
    """The steps of one run of a machine, and how it ended."""

    machine: type[Machine]
    taken: list[Taken] = field(default_factory=list)
    error: Exception | None = None

    def play(self, steps: Callable[[Machine], Iterator[Taken]]) -> Schedule:
        """Take steps until there are no more or one fails; return this."""
        state = self.machine()
        try:
            for each in steps(state):
                self.taken.append(each)
                getattr(state, each.name)(**each.arguments)
        except Exception as error:
            self.error = error
            state.close()
            return self
        try:
            state.teardown()
        except Exception as error:
            self.error = error
        return self

    def __str__(self) -> str:
        lines = [f"state = {self.machine.__name__}()", *map(str, self.taken), "state.teardown()"]
        return "\n".join(lines)


def drawn(machine: type[Machine], seed: int) -> Schedule:
    """Play the schedule of a seed."""
    rng = random.Random(f"{machine.__name__} {seed}")

    def steps(state: Machine) -> Iterator[Taken]:
        (opening,) = (name for name, each in machine.rules.items() if each.is_first)
        yield _taken(rng, machine, opening)
        share, count = pick(rng, SHARES), Between(LEAST_STEPS, MOST_STEPS).draw(rng)
        used = [name for name, each in machine.rules.items() if not each.is_first and rng.random() < share]
        for _ in range(count):
            possible = [name for name in used if machine.rules[name].when(state)]
            if possible:
                yield _taken(rng, machine, pick(rng, possible))

    return Schedule(machine).play(steps)


def _taken(rng: random.Random, machine: type[Machine], name: str) -> Taken:
    return Taken(name, {key: each.draw(rng) for key, each in machine.rules[name].arguments.items()})


def shortened(failed: Schedule) -> Schedule:
    """Return a shorter schedule that fails in the same way: with the same kind of error."""
    best, size = failed, max(1, len(failed.taken) // 2)
    trials = 0
    while size and trials < MOST_TRIALS:
        at, was = 1, len(best.taken)
        while at < len(best.taken) and trials < MOST_TRIALS:
            fewer = best.taken[:at] + best.taken[at + size :]
            trials += 1
            found = Schedule(failed.machine).play(lambda _, fewer=fewer: iter(fewer))  # type: ignore[misc]
            if type(found.error) is type(failed.error):
                best = found
            else:
                at += size
        if size == 1 and len(best.taken) == was:
            break
        size = max(1, size // 2)
    return best


class ScheduleError(AssertionError):
    """A schedule failed."""


def play_all(machine: type[Machine], seeds: Sequence[int], *, shorten: bool = False) -> None:
    """Play the schedules of some seeds; raise an error that names the first one that fails and shows it."""
    for seed in seeds:
        found = drawn(machine, seed)
        if found.error is None:
            continue
        shown = shortened(found) if shorten else found
        raise ScheduleError(
            f"{machine.__name__} fails with seed {seed}: {shown.error}\n"
            f"Repeat it: scripts/test --hypothesis-seed={seed} tests/simulation/test_control_simulation.py\n"
            f"{shown}"
        ) from shown.error
