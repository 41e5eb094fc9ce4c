"""The control plane under random schedules of verbs and faults, in virtual time."""

from __future__ import annotations

import random

import pytest
from app_machine import AppMachine
from control_machine import ControlMachine
from hypothesis import settings
from schedules import Machine, play_all

#: Number of schedules in every run of the suite: those of the seeds 0, 1 and so on. The profile ``nightly``
#: plays more, from a random seed on; ``--hypothesis-seed=60`` plays the one of seed 60.
SCHEDULES = 200
APP_SCHEDULES = 100


def play(machine: type[Machine], schedules: int, config: pytest.Config) -> None:
    chosen = config.getoption("hypothesis_seed")
    is_nightly = not settings().derandomize
    if chosen is not None:
        seeds = range(int(chosen), int(chosen) + 1)
    elif is_nightly:
        begin = random.SystemRandom().randrange(10**9)
        seeds = range(begin, begin + settings().max_examples)
    else:
        seeds = range(schedules)
    play_all(machine, seeds, shorten=is_nightly)


def test_random_schedules_keep_acknowledged_changes_and_reach_the_wanted_state(
    pytestconfig: pytest.Config,
) -> None:
    play(ControlMachine, SCHEDULES, pytestconfig)


def test_random_schedules_never_leave_half_an_application(pytestconfig: pytest.Config) -> None:
    play(AppMachine, APP_SCHEDULES, pytestconfig)
