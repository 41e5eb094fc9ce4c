"""The control plane under random schedules of verbs and faults, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from app_machine import AppMachine
from control_machine import ControlMachine
from hypothesis import settings
from schedules import Machine, play_all

#: Number of schedules with the option ``--nightly``: those of the seeds 0, 1 and so on. Every run of the
#: suite plays the first block of each machine. The profile ``nightly`` plays more schedules, from a random
#: seed on; ``--hypothesis-seed=60`` plays the schedule of seed 60.
SCHEDULES: dict[type[Machine], int] = {ControlMachine: 200, AppMachine: 100}
#: Number of schedules per test.
BLOCK = 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_fixed = metafunc.config.getoption("hypothesis_seed") is None and settings().derandomize
    cases = [
        pytest.param(
            machine,
            seeds,
            id=f"{machine.__name__}-{seeds[0]}-to-{seeds[-1]}",
            marks=[pytest.mark.nightly] if is_fixed and seeds[0] else [],
        )
        for machine, count in SCHEDULES.items()
        for seeds in blocks(_seeds(metafunc.config, count))
    ]
    metafunc.parametrize(("machine", "seeds"), cases)


def _seeds(config: pytest.Config, count: int) -> range:
    chosen = config.getoption("hypothesis_seed")
    if chosen is not None:
        return range(int(chosen), int(chosen) + 1)
    if settings().derandomize:
        return range(count)
    begin = random.SystemRandom().randrange(10**9)
    return range(begin, begin + settings().max_examples)


def blocks(seeds: range) -> list[range]:
    return [seeds[at : at + BLOCK] for at in range(0, len(seeds), BLOCK)]


def test_random_schedules_keep_acknowledged_changes_and_reach_the_wanted_state(
    machine: type[Machine], seeds: Sequence[int]
) -> None:
    """Schedules of applications also leave no half-changed application."""
    play_all(machine, seeds, shorten=not settings().derandomize)
