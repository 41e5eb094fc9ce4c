"""The facts that a call carries of the request that makes it: its route, and its trace."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

from daskserve.cluster.protocols.base import ClusterConnection
from daskserve.common.clock import wall_ns
from daskserve.context import RequestContext
from daskserve.data.caller.routing.router import SAMPLING
from daskserve.telemetry.tracing.carrier import NEW, TRACE

#: The part of a call that user code can read as its request's context: ids of `CallOptions`, the route. Until
#: the call is sent, its trace is here, too.
Facts: TypeAlias = Mapping[str, Any] | None


def facts_of_call(
    facts: Facts, current: RequestContext | None, connection: ClusterConnection, shared: Mapping[str, Any]
) -> Facts:
    """Return the facts of a call that the present request makes, if there is one."""
    if current is not None:
        if current.route:
            facts = {**(facts or {}), "route": current.route}
        if current.is_shown:
            facts = {**(facts or {}), "is_shown": True}
    if "opentelemetry.context" in sys.modules:
        from daskserve.telemetry.tracing.context import outgoing

        if (carrier := outgoing()) is not None:
            return {**(facts or {}), TRACE: carrier}
    # A request without a trace is not sampled, and nor is what it calls.
    if current is None and (ratio := shared.get(SAMPLING)) and connection.rng.random() < ratio:
        return {**(facts or {}), TRACE: [NEW, "", "", str(wall_ns())]}
    return facts


def head_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a call's head for its facts."""
    if TRACE not in facts:
        return {"facts": facts} if facts else {}
    others = {name: value for name, value in facts.items() if name != TRACE}
    return {TRACE: facts[TRACE], **({"facts": others} if others else {})}
