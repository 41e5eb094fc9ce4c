"""A policy that scales on any value in Prometheus, such as a queue length, a lag, or tokens per second."""

from __future__ import annotations

import math
from collections.abc import Mapping

from daskserve.autoscaling.context import AutoscalingContext, Decision, Policy
from daskserve.common.formatting import shown


def promql(targets: Mapping[str, float]) -> Policy:
    """Return a policy that runs as many replicas as the most demanding of the config's queries needs.

    Parameters
    ----------
    targets : mapping
        Value per replica of each query, by the query's name.

    Raises
    ------
    ValueError
        There is no target, or a target is not above 0.
    """
    if not isinstance(targets, Mapping) or not targets:
        raise ValueError(
            f"targets is {targets!r}; give the value per replica for the names of prometheus_queries, such "
            'as policy_kwargs={"targets": {"lag": 100}}'
        )
    for name, target in targets.items():
        if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target < math.inf:
            raise ValueError(f"the target of {name!r} is {target!r}; give a number above 0")

    def decide(context: AutoscalingContext) -> Decision:
        unknown = sorted(set(targets) - set(context.config.prometheus_queries))
        if unknown:
            known = ", ".join(sorted(context.config.prometheus_queries)) or "none"
            raise ValueError(f"prometheus_queries has no query {unknown[0]!r}; it has: {known}")
        current = context.target_num_replicas
        most, parts = 0, []
        missing = sorted(set(targets) - set(context.queries))
        for name, target in targets.items():
            value = context.queries.get(name)
            if value is not None and math.isfinite(value):
                most = max(most, context.whole_replicas(max(0.0, value) / target))
                parts.append(f"{name} is {shown(value)}, {shown(target)} per replica wanted")
            elif name not in missing:
                missing.append(name)
        if missing:
            # An unknown value may be the one that needs the most replicas, so do not scale down.
            most = max(most, current)
            parts.append(f"no fresh value of {', '.join(missing)}, so not fewer than {current}")
        return Decision(most, f"{'; '.join(parts)}: {most}")

    return decide
