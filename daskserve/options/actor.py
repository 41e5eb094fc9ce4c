"""The resources that a replica asks for."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from daskserve.options.base import Options


class ActorOptions(Options):
    """Resources of one replica; daskserve compares them with what the workers declare."""

    place: ClassVar[str] = "actor_options"

    num_cpus: float = Field(
        0.1, ge=0, description="Share of a worker's threads. The default lets ten replicas share one."
    )
    num_gpus: float = Field(0, ge=0, description="Amount of the worker resource ``GPU``.")
    memory: int = Field(0, ge=0, description="Bytes of the worker's memory limit.")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Amounts of declared Dask worker resources."
    )
    workers: list[str] | None = Field(
        None, description="Addresses, names or hosts of the only workers allowed; None allows all."
    )

    @field_validator("resources")
    @classmethod
    def _amounts_are_positive(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if amount < 0:
                raise ValueError(f"resource {name!r} asks for {amount}; an amount cannot be negative")
        return value

    def demand(self) -> dict[str, float]:
        """Return the amounts by resource name, including CPU, GPU and memory."""
        wanted = dict(self.resources)
        for name, amount in (("CPU", self.num_cpus), ("GPU", self.num_gpus), ("memory", self.memory)):
            if amount:
                wanted[name] = wanted.get(name, 0) + amount
        return wanted
