"""Placement groups: bundles of resources that each replica reserves together, with itself in the first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator

from daskserve.common.formatting import shown
from daskserve.options.actor import ActorOptions
from daskserve.options.base import as_bytes

#: How bundles that are placed together lie to each other.
Strategy: TypeAlias = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


def _memory_in_bytes(bundle: Any) -> Any:
    """Return a bundle whose memory is a number, if it is a text such as ``"2GB"``."""
    if isinstance(bundle, Mapping) and "memory" in bundle:
        return {**bundle, "memory": as_bytes(bundle["memory"])}
    return bundle


#: The resources of one bundle.
Bundle = Annotated[dict[str, float], BeforeValidator(_memory_in_bytes)]


def check_bundles(bundles: Sequence[Mapping[str, float]]) -> None:
    """Raise `ValueError` unless these are bundles of resources."""
    if not bundles:
        raise ValueError("there is no bundle; give at least one, in which the replica runs, or None")
    for number, bundle in enumerate(bundles):
        for name, amount in bundle.items():
            if not 0 <= amount < math.inf:
                raise ValueError(
                    f"bundle {number} asks for {amount} of {name!r}; an amount is a finite number from 0"
                )
            if name.startswith("num_") and name in ActorOptions.model_fields:
                right = name.removeprefix("num_")[:-1].upper()
                raise ValueError(f"bundle {number} has {name!r}; in a bundle, the resource is {right!r}")
        if not any(bundle.values()):
            raise ValueError(f"bundle {number} is {dict(bundle)!r}; give an amount above 0")


def check_covered(bundles: Sequence[Mapping[str, float]] | None, options: ActorOptions) -> None:
    """Raise `ValueError` unless the first bundle, if there is any, has room for the replica itself."""
    if not bundles:
        return
    for name, amount in options.demand().items():
        if amount > bundles[0].get(name, 0):
            raise ValueError(
                f"placement_group_bundles[0] is {dict(bundles[0])!r}, and the replica, which runs in it, "
                f"needs {shown(amount)} of {name!r} by its actor_options; add it to the first bundle, or "
                "ask for less in actor_options"
            )
