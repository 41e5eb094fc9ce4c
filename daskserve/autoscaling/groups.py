"""One policy for several backends: asking it, and whether what it answers can be acted upon."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from daskserve.autoscaling.answers import as_decision
from daskserve.autoscaling.context import AutoscalingContext, Decision
from daskserve.autoscaling.loading import CallablePolicy
from daskserve.types import BackendTag

LEFT_OUT = "the policy of the group leaves it as it is"


async def decide_together(
    policy: CallablePolicy, contexts: Mapping[BackendTag, AutoscalingContext]
) -> dict[BackendTag, Decision]:
    """Return what a policy, plain or async, decides about each of these backends.

    Raises
    ------
    TypeError, ValueError
        The answer is of no use. Then none of it is, because the numbers depend on each other.
    """
    answer = policy(dict(contexts))
    if inspect.isawaitable(answer):
        answer = await answer
    return judged(answer, contexts)


def judged(answer: Any, contexts: Mapping[BackendTag, AutoscalingContext]) -> dict[BackendTag, Decision]:
    """Return a decision for each backend of the group in plain values; one left out keeps its number."""
    if not isinstance(answer, Mapping):
        raise TypeError(
            f"it returned {answer!r}; return a dict with a number of replicas, (number, state) or a Decision "
            "for each backend by its name"
        )
    unknown = [name for name in answer if name not in contexts]
    if unknown:
        raise ValueError(
            f"it returned {answer[unknown[0]]!r} for {unknown[0]!r}, which is not in the group; there are: "
            f"{', '.join(sorted(contexts))}"
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
        # What is of the user's types goes no further than this thread.
        state = dict(decision.state)
        found[name] = Decision(int(decision.replicas), str(decision.reason), state, bool(decision.is_urgent))
    return found
