"""Whether what a policy answered can be acted upon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from daskserve.autoscaling.context import Decision


def as_decision(answer: Any) -> Decision:
    """Return a policy's answer as a `Decision`: it may be one, a number, or a number and the new state.

    Raises
    ------
    TypeError, ValueError
        It is none of these.
    """
    if isinstance(answer, Decision):
        decision = answer
    elif isinstance(answer, tuple) and len(answer) == 2:
        decision = Decision(answer[0], f"the policy wants {answer[0]}", answer[1])
    else:
        decision = Decision(answer, f"the policy wants {answer}")
    number: Any = decision.replicas  # whatever the user's function said
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(
            f"it returned {answer!r}; return a whole number of replicas, (number, state) or a Decision"
        )
    if number < 0:
        raise ValueError(f"it returned {number} replicas; a number cannot be negative")
    if not isinstance(decision.state, Mapping):
        raise TypeError(f"its state is {decision.state!r}; it has to be a dict of plain values")
    return replace(decision, replicas=number) if number is not decision.replicas else decision
