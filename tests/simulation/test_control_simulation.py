"""The control plane under random schedules of verbs and faults, in virtual time."""

from __future__ import annotations

from app_machine import AppMachine
from control_machine import ControlMachine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

#: Number of schedules in every run of the suite. The profile ``nightly`` runs more, different ones each time.
SCHEDULES = 300
APP_SCHEDULES = 150
STEPS = 30


def play(machine: type[RuleBasedStateMachine], schedules: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(schedules, settings().max_examples),
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_schedules_keep_acknowledged_changes_and_reach_the_wanted_state() -> None:
    play(ControlMachine, SCHEDULES)


def test_random_schedules_never_leave_half_an_application() -> None:
    play(AppMachine, APP_SCHEDULES)
