"""Check and convert the answers of policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from daskserve.autoscaling.context import Decision
from daskserve.common.formatting import as_whole, counted


def as_decision(answer: Any) -> Decision:
    """Convert a policy's answer to a `Decision`.

    The answer is a `Decision`, a number of replicas, or a tuple of a number and the new state.

    Raises
    ------
    TypeError, ValueError
        The answer is none of these.
    """
    if isinstance(answer, Decision):
        decision = answer
    elif isinstance(answer, tuple) and len(answer) == 2:
        decision = Decision(answer[0], f"the policy wants {answer[0]}", answer[1])
    else:
        decision = Decision(answer, f"the policy wants {answer}")
    number = as_whole(decision.replicas)  # a user's function may return any type here
    if number is None:
        raise TypeError(
            f"it returned {answer!r}; return a whole number of replicas, (number, state) or a Decision"
        )
    if number < 0:
        raise ValueError(f"it returned {counted(number, 'replica')}; return 0 or more")
    if not isinstance(decision.state, Mapping):
        raise TypeError(f"its state is {decision.state!r}; return a dict of plain values")
    return replace(decision, replicas=number) if number is not decision.replicas else decision
