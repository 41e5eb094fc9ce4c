"""Gangs and placement groups.

The replicas of a gang start together or not at all, and end together. A placement group consists of the
bundles of resources that one replica reserves together; the replica runs in the first one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from daskserve.common.formatting import shown
from daskserve.options.actor import ActorOptions
from daskserve.options.fields.base import Options, as_bytes

#: How bundles that are placed together are spread over workers and hosts.
Strategy: TypeAlias = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class GangSchedulingConfig(Options):
    """How the replicas of a deployment form gangs, for code that works only if all of its parts run."""

    place: ClassVar[str] = "gang_scheduling_config"

    gang_size: int = Field(
        ge=1, description="Number of replicas in a gang; ``num_replicas`` must be a multiple of it."
    )
    gang_placement_strategy: Literal["PACK", "SPREAD"] = Field(
        "PACK",
        description="Where the replicas of a gang go: ``PACK`` onto one worker if possible, else onto as few "
        "workers and hosts as possible, or ``SPREAD`` over as many as possible.",
    )
    runtime_failure_policy: Literal["RESTART_GANG"] = Field(
        "RESTART_GANG",
        description="What happens when a replica is lost: the other replicas of its gang are killed, and "
        "a new gang starts.",
    )

    @field_validator("runtime_failure_policy", mode="before")
    @classmethod
    def _is_there(cls, value: Any) -> Any:
        if value == "RESTART_REPLICA":
            raise NotImplementedError(
                "runtime_failure_policy='RESTART_REPLICA' is not available: a gang restarts as a whole. Use "
                "'RESTART_GANG', or leave gang_scheduling_config out."
            )
        return value


def check_whole(replicas: int, size: int) -> None:
    """Raise `ValueError` unless a number of replicas forms whole gangs."""
    if replicas % size:
        raise ValueError(
            f"num_replicas={replicas} must be a multiple of gang_size={size}; the next one is "
            f"{-(-replicas // size) * size}"
        )


def _memory_in_bytes(bundle: Any) -> Any:
    """Return a bundle with its memory as a number, also if it was a string such as ``"2GB"``."""
    if isinstance(bundle, Mapping) and "memory" in bundle:
        return {**bundle, "memory": as_bytes(bundle["memory"])}
    return bundle


def _checked_bundles(bundles: list[dict[str, float]]) -> list[dict[str, float]]:
    if not bundles:
        raise ValueError("there is no bundle; give at least one, in which the replica runs, or None")
    for number, bundle in enumerate(bundles):
        for name, amount in bundle.items():
            if not 0 <= amount < math.inf:
                raise ValueError(
                    f"bundle {number} has the amount {amount} of {name!r}; give a finite number, 0 or more"
                )
            if name.startswith("num_") and name in ActorOptions.model_fields:
                right = name.removeprefix("num_")[:-1].upper()
                raise ValueError(f"bundle {number} has {name!r}; in a bundle, the resource is {right!r}")
        if not any(bundle.values()):
            raise ValueError(f"bundle {number} is {bundle!r}; give an amount above 0")
    return bundles


#: The type of an option that is a list of bundles of resources.
Bundles = Annotated[
    list[Annotated[dict[str, float], BeforeValidator(_memory_in_bytes)]], AfterValidator(_checked_bundles)
]


def check_covered(bundles: Sequence[Mapping[str, float]] | None, options: ActorOptions) -> None:
    """Raise `ValueError` unless the first bundle, if there is any, has room for the replica itself."""
    if not bundles:
        return
    for name, amount in options.demand().items():
        if amount > bundles[0].get(name, 0):
            raise ValueError(
                f"placement_group_bundles[0] is {dict(bundles[0])!r}, but the replica runs in it and its "
                f"actor_options need {shown(amount)} of {name!r}; increase the first bundle, or reduce "
                "actor_options"
            )
