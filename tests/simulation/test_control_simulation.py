"""The control plane under random schedules: verbs, deaths, hangs, crashes and lost news, in virtual time."""

from __future__ import annotations

from control_machine import ControlMachine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

#: In every run of the suite; the profile ``nightly`` plays more, and others every time.
SCHEDULES = 500
STEPS = 30


def test_whatever_happens_what_was_acknowledged_holds_and_what_is_wanted_comes_about() -> None:
    run_state_machine_as_test(
        ControlMachine,
        settings=settings(
            max_examples=max(SCHEDULES, settings().max_examples),
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),
        ),
    )
