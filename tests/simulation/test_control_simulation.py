"""The control plane under random schedules: verbs, deaths, hangs, crashes and lost news, in virtual time."""

from __future__ import annotations

from control_machine import ControlMachine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test


def test_whatever_happens_what_was_acknowledged_holds_and_what_is_wanted_comes_about() -> None:
    run_state_machine_as_test(
        ControlMachine,
        settings=settings(
            max_examples=20,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
            deadline=None,
            derandomize=True,
        ),
    )
