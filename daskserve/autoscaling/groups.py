"""Call one policy for several backends, and check its answer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from daskserve.autoscaling.context import AutoscalingContext, CustomPolicy, Decision
from daskserve.autoscaling.results import as_decision
from daskserve.common.types import BackendTag

LEFT_OUT = "the group's policy does not change this deployment"


async def decide_together(
    policy: CustomPolicy, contexts: Mapping[BackendTag, AutoscalingContext]
) -> dict[BackendTag, Decision]:
    """Return the decision of a policy, plain or async, for each of these backends.

    Raises
    ------
    TypeError, ValueError
        A part of the answer is invalid. The whole answer is then refused, because its numbers depend on each
        other.
    """
    answer = policy(dict(contexts))
    if inspect.isawaitable(answer):
        answer = await answer
    return checked_decisions(answer, contexts)


def checked_decisions(
    answer: Any, contexts: Mapping[BackendTag, AutoscalingContext]
) -> dict[BackendTag, Decision]:
    """Return a decision in plain values for each backend; a backend that is left out keeps its number."""
    if not isinstance(answer, Mapping):
        raise TypeError(
            f"it returned {answer!r}; return a dict from the name of each deployment to a number of "
            "replicas, (number, state) or a Decision"
        )
    unknown = [name for name in answer if name not in contexts]
    if unknown:
        raise ValueError(
            f"it returned {answer[unknown[0]]!r} for {unknown[0]!r}, which is not in the group; the group "
            f"has: {', '.join(sorted(contexts))}"
        )
    found = {}
    for name, context in contexts.items():
        if name not in answer:
            found[name] = Decision(context.target_num_replicas, LEFT_OUT, context.state)
            continue
        try:
            decision = as_decision(answer[name])
        except (TypeError, ValueError) as error:
            raise type(error)(f"for {name!r} {error}") from None
        # Convert to plain types, because objects of user types must not leave this thread.
        state = dict(decision.state)
        found[name] = Decision(int(decision.replicas), str(decision.reason), state, bool(decision.is_urgent))
    return found
