"""The resources of a replica."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from daskserve.options.fields.base import Amount, ByteCount, Options, parse_typed
from daskserve.options.fields.ray_names import INSTEAD

#: Prefix of the resource that names a worker's type of accelerator.
ACCELERATOR = "accelerator_type:"
#: The amount of the accelerator's resource that a replica occupies; it is small, so that many replicas can
#: share one accelerator.
ACCELERATOR_SHARE = 0.001


class ActorOptions(Options):
    """Resources of one replica; daskserve compares them with the resources that workers declare."""

    place: ClassVar[str] = "actor_options"

    num_cpus: Amount = Field(
        0.1,
        ge=0,
        allow_inf_nan=False,
        description="Number of the worker's threads that a replica reserves, also a fraction. With the "
        "default, ten replicas share one thread.",
    )
    num_gpus: Amount = Field(
        0,
        ge=0,
        allow_inf_nan=False,
        description="Amount of the worker resource ``GPU`` that a replica reserves.",
    )
    memory: ByteCount = Field(
        0,
        ge=0,
        description="Memory that a replica reserves of its worker's memory limit: a number of bytes, or "
        'a text such as ``"2GB"``.',
    )
    resources: dict[str, Amount] = Field(
        default_factory=dict,
        description="Amounts of other Dask worker resources that a replica reserves, by name.",
    )
    accelerator_type: str | None = Field(
        None,
        min_length=1,
        description="Type of accelerator, such as ``A100``. Replicas run only on workers that declare "
        "the resource ``accelerator_type:A100``, in any amount.",
    )
    workers: list[str] | None = Field(
        None, description="Workers on which replicas may run: addresses, names or hosts. None: all workers."
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_the_default(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        unused = {
            name for name, field in cls.model_fields.items() if field.default is not None
        } | INSTEAD.keys()
        return {name: value for name, value in values.items() if value is not None or name not in unused}

    @field_validator("resources")
    @classmethod
    def _amounts_are_positive(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if not name:
                raise ValueError(
                    f"a resource with the amount {amount} has no name; give the name that workers declare"
                )
            if not 0 <= amount < math.inf:
                raise ValueError(
                    f"resource {name!r} has the amount {amount}; give a finite number, 0 or more"
                )
        return value

    @field_validator("workers")
    @classmethod
    def _allow_some(cls, value: list[str] | None) -> list[str] | None:
        if value == []:
            raise ValueError("there are no workers; give at least one, or None, which allows all")
        return value

    def demand(self) -> dict[str, float]:
        """Return the amounts by resource name, including CPU, GPU and memory."""
        wanted = dict(self.resources)
        for name, amount in (("CPU", self.num_cpus), ("GPU", self.num_gpus), ("memory", self.memory)):
            if amount:
                wanted[name] = wanted.get(name, 0) + amount
        if self.accelerator_type is not None:
            wanted[f"{ACCELERATOR}{self.accelerator_type}"] = ACCELERATOR_SHARE
        return wanted


def parse_actor_options(
    actor_options: ActorOptions | Mapping[str, Any] | None,
    ray_actor_options: Mapping[str, Any] | None,
    env: Any,
) -> tuple[ActorOptions, Any]:
    """Return a replica's resources and its environment.

    Parameters
    ----------
    ray_actor_options : mapping, optional
        Ray Serve's name of ``actor_options``; its ``runtime_env`` is ``env``.

    Raises
    ------
    TypeError, ValueError
        The options are wrong, or one is given under both names.
    """
    if ray_actor_options is None:
        return parse_typed(ActorOptions, actor_options, what="actor_options"), env
    if actor_options is not None:
        raise ValueError("ray_actor_options is another spelling of actor_options; give only one of them")
    found: Any = ray_actor_options
    if isinstance(ray_actor_options, Mapping):
        found = dict(ray_actor_options)
        runtime_env = found.pop("runtime_env", None)
        if runtime_env:
            if env is not None:
                raise ValueError("runtime_env of ray_actor_options is another spelling of env; give only one")
            env = runtime_env
    return parse_typed(ActorOptions, found, what="ray_actor_options"), env
