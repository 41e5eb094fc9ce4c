"""The same seed always gives the same schedule. A failure names its seed, and can be shortened."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from app_machine import AppMachine
from control_machine import ControlMachine
from schedules import (
    LEAST_STEPS,
    MOST_STEPS,
    Between,
    Machine,
    OneOf,
    ScheduleError,
    Several,
    drawn,
    first,
    play_all,
    rule,
    shortened,
)
from simulated_cluster import SimulatedCluster, SimulatedStore
from simulation import UnexpectedErrors


class Counting(Machine):
    """Fails once it has counted to five, or at its end if it has counted to three."""

    def __init__(self) -> None:
        self.count = 0
        self.is_closed = False

    @first(count=Between(0, 0))
    def begin(self, count: int) -> None:
        self.count = count

    @rule(names=Several(OneOf("a", "b"), 1, 3))
    def idle(self, names: list[str]) -> None:
        assert 1 <= len(names) <= 3

    @rule(when=lambda self: self.count < 4, by=Between(1, 2))
    def add(self, by: int) -> None:
        self.count += by
        if self.count >= 5:
            raise ValueError(f"counted to {self.count}")

    def teardown(self) -> None:
        self.close()
        if self.count >= 3:
            raise ValueError(f"ended at {self.count}")

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


def test_a_seed_draws_the_same_schedule_again_and_another_seed_another_one() -> None:
    one, again, other = (drawn(Counting, seed) for seed in (1, 1, 2))
    assert str(one) == str(again) != str(other)
    for seed in range(20):
        steps = drawn(Counting, seed).taken
        assert len(steps) <= MOST_STEPS + 1
        assert steps[0].name == "begin"
    assert max(len(drawn(Counting, seed).taken) for seed in range(20)) > LEAST_STEPS


def test_every_rule_is_drawn_while_it_applies() -> None:
    names = {step.name for seed in range(20) for step in drawn(Counting, seed).taken}
    assert names == set(Counting.rules)


def test_the_first_failure_is_raised_with_its_seed_and_its_steps() -> None:
    failing = next(seed for seed in range(100) if drawn(Counting, seed).error is not None)
    with pytest.raises(ScheduleError) as raised:
        play_all(Counting, range(100))
    lines = str(raised.value).splitlines()
    assert lines[0].startswith(f"Counting fails with seed {failing}: ")
    assert f"--hypothesis-seed={failing} " in lines[1]
    assert lines[2:4] == ["state = Counting()", "state.begin(count=0)"]
    assert lines[-1] == "state.teardown()"
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_failure_is_shortened_to_the_steps_that_it_needs() -> None:
    failed = [found for seed in range(20) if (found := drawn(Counting, seed)).error is not None]
    assert failed
    for each in map(shortened, failed):
        assert isinstance(each.error, ValueError)
        assert {step.name for step in each.taken} == {"begin", "add"}
        assert len(each.taken) <= 4


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mapping[str, bytes | None]]]:
    commits: list[Mapping[str, bytes | None]] = []
    write = SimulatedStore._commit

    async def commit(store: SimulatedStore, epoch: int, change: object) -> None:
        commits.append(dict(change.records))  # type: ignore[attr-defined]
        await write(store, epoch, change)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedStore, "_commit", commit)
        yield commits


@pytest.mark.parametrize("machine", [ControlMachine, AppMachine])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_schedule_leads_to_the_same_changes_again(
    machine: type[Machine], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for _ in range(2):
        with recorded(monkeypatch) as commits:
            drawn(machine, seed)
        runs.append(commits)
    assert runs[0]
    assert runs[0] == runs[1]


def test_a_schedule_fails_if_a_background_task_fails_by_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    async def restart(cluster: SimulatedCluster, epoch: int, worker: str) -> None:
        raise TypeError("mistaken")

    def hang() -> None:
        state = ControlMachine()
        try:
            state.begin(3, 2, "EveryWorker", 0.0, True, "d", None)
            state.harm_worker(1, "suspend", seconds=20.0)
        finally:
            state.close()

    hang()
    monkeypatch.setattr(SimulatedCluster, "_restart", restart)
    with pytest.raises(AssertionError, match=r"A background task failed: TypeError\('mistaken'\)"):
        hang()
    assert not any(isinstance(each, UnexpectedErrors) for each in logging.getLogger("daskserve").handlers)
