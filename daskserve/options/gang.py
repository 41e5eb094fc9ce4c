"""Gangs: replicas that start together or not at all, and end together."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from daskserve.options.base import Options


class GangSchedulingConfig(Options):
    """How the replicas of a deployment form gangs, for code that works only if all its parts are there."""

    place: ClassVar[str] = "gang_scheduling_config"

    gang_size: int = Field(
        ge=1, description="Number of replicas of a gang; ``num_replicas`` must be a multiple of it."
    )
    gang_placement_strategy: Literal["PACK", "SPREAD"] = Field(
        "PACK",
        description="Where the replicas of a gang go: ``PACK`` onto one worker if possible, else onto as few "
        "workers and hosts as possible, or ``SPREAD`` over as many as possible.",
    )
    runtime_failure_policy: Literal["RESTART_GANG"] = Field(
        "RESTART_GANG",
        description="What happens when a replica is lost: the others of its gang are killed, and a new gang "
        "starts.",
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
    """Raise `ValueError` unless a number of replicas is one of whole gangs."""
    if replicas % size:
        raise ValueError(
            f"num_replicas={replicas} must be a multiple of gang_size={size}; the next one is "
            f"{-(-replicas // size) * size}"
        )
