"""The actors of a deployment: singletons that its replicas share."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator

from daskserve.errors import BadRequestError
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.fields.base import Options, parse_options

#: Maximum number of concurrent calls of an actor whose methods are all ``async def``.
ASYNC_CALLS = 1000
#: Separates the name of a deployment from that of its actor, in the name of the actor's own deployment.
SEPARATOR = ":"


class DeploymentActorConfig(Options):
    """An actor that all replicas of a deployment share, such as a counter, a cache or a queue."""

    place: ClassVar[str] = "deployment_actors"

    name: str = Field(description="Name of the actor, for ``serve.get_deployment_actor(name)``.")
    actor_class: Any = Field(description='The class, or its import path ``"module:Class"``.')
    init_args: tuple[Any, ...] = Field((), description="Positional arguments of the class.")
    init_kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")
    actor_options: ActorOptions = Field(
        default_factory=ActorOptions,
        description="Resources of the actor, with the same options as those of a replica.",
    )
    max_concurrency: int | None = Field(
        None,
        ge=1,
        description=(
            f"Maximum number of concurrent calls. None: {ASYNC_CALLS} if all methods are ``async "
            "def``, otherwise 1."
        ),
    )

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not value or any(each in value for each in ("#", "/", SEPARATOR)):
            raise ValueError(f"must be a name without '#', '/' and '{SEPARATOR}', got {value!r}")
        return value

    @field_validator("actor_class")
    @classmethod
    def _is_a_class(cls, value: Any) -> Any:
        if not (inspect.isclass(value) or isinstance(value, str)):
            raise ValueError(f"must be a class or its import path, got {value!r}")
        return value

    def config(self, of: BackendConfig, *, is_blocking: bool) -> BackendConfig:
        """Return the backend options with which the actor runs.

        Parameters
        ----------
        of
            The options of its deployment.
        is_blocking
            Whether one of its methods is a plain function.
        """
        return BackendConfig(
            num_replicas=1,
            start_timeout_s=of.start_timeout_s,
            max_ongoing_requests=self.max_concurrency or (1 if is_blocking else ASYNC_CALLS),
            max_queued_requests=-1,
            health_check_period_s=10,
            health_check_timeout_s=30,
            health_check_threshold=3,
        )

    @classmethod
    def parse_all(cls, actors: Iterable[Self | Mapping[str, Any]] | None) -> tuple[Self, ...]:
        """Return actors, which may be dicts of their options, checked.

        Raises
        ------
        TypeError, ValueError
            A value is not an actor, an option is wrong, or two actors have the same name.
        """
        if actors is None:
            return ()
        if not isinstance(actors, (list, tuple)):
            raise TypeError(f"deployment_actors must be a list of DeploymentActorConfig, got {actors!r}")
        found = tuple(parse_options(cls, each, what="Each of deployment_actors") for each in actors)
        names = [each.name for each in found]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BadRequestError(f"deployment_actors has two actors named {twice[0]!r}; rename one of them.")
        return found
