"""The control plane under random schedules of verbs and faults, in virtual time."""

from __future__ import annotations

from control_machine import ControlMachine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

#: Number of schedules in every run of the suite. The profile ``nightly`` runs more, different ones each time.
SCHEDULES = 400
STEPS = 30


def test_random_schedules_keep_acknowledged_changes_and_reach_the_wanted_state() -> None:
    run_state_machine_as_test(
        ControlMachine,
        settings=settings(
            max_examples=max(SCHEDULES, settings().max_examples),
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),
        ),
    )
