"""Definitions for the classic verbs: a callable, or a deployment with its options, bound or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.client.definitions.deployments import Application, Deployment, found_in
from daskserve.errors import BadRequestError


def unwrapped(
    name: str, definition: Any, init_args: tuple[Any, ...], init_kwargs: Mapping[str, Any]
) -> tuple[Deployment, tuple[Any, ...], Mapping[str, Any]]:
    """Return a callable as a deployment, and the arguments of its constructor.

    A deployment keeps its options. It keeps its bound arguments only if no others are given.

    Raises
    ------
    BadRequestError
        It is part of an application that only `daskserve.run` can deploy, or has arguments twice.
    """
    has_arguments = bool(init_args or init_kwargs)
    if isinstance(definition, Application):
        if has_arguments:
            raise BadRequestError(
                f"{definition!r} already has the arguments of its bind(); pass no further ones with {name!r}."
            )
        init_args, init_kwargs = definition.args, definition.kwargs
        definition = definition.deployment
    elif isinstance(definition, Deployment) and not has_arguments:
        init_args = getattr(definition, "init_args", ())
        init_kwargs = getattr(definition, "init_kwargs", {})
    if not isinstance(definition, Deployment):
        definition = Deployment(definition, name)
    remedy = "run it with serve.run(), which deploys all parts of an application."
    if definition.actors:
        raise BadRequestError(f"Deployment {definition.name!r} has deployment_actors; {remedy}")
    other = found_in((init_args, init_kwargs), (Application, Deployment))
    if other is not None:
        raise BadRequestError(f"{name!r} has {other!r} as an argument; {remedy}")
    return definition, init_args, init_kwargs
