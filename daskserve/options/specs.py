"""The specs of backends and applications that clients send to the controller.

The options are models that the client has validated. In messages and in the store, a model consists of the
options that were set, so that a reader with newer models fills in its own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter

from daskserve.common.types import DEFAULT_APPLICATION, BackendTag, tag_part
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig


def deployment_tag(application: str, deployment: str) -> BackendTag:
    """Return the tag of an application's deployment, which is its backend's tag and its endpoint's name.

    In the default application, the tag is the deployment's own name. In any other one, the name of the
    application comes first.
    """
    name = tag_part(deployment)
    return name if application == DEFAULT_APPLICATION else f"{tag_part(application)}/{name}"


def actor_tag(application: str, deployment: str, actor: str) -> BackendTag:
    """Return the tag of a deployment's actor, to which the digest of its version is added."""
    return f"{deployment_tag(application, deployment)}:{actor}::"


class Spec:
    """Base class: encodes to and decodes from plain values."""

    __slots__ = ()

    def to_plain(self) -> dict[str, Any]:
        """Return the spec as plain values, without the parts of parcels."""
        values: dict[str, Any] = _ADAPTERS[type(self)].dump_python(self, exclude_unset=True)
        return values

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """Return the spec for values from `to_plain`.

        Its models are validated, which fills in options that follow from others.
        """
        spec: Self = _ADAPTERS[cls].validate_python(values)
        return spec


@dataclass(frozen=True, slots=True)
class BackendSpec(Spec):
    """The definition of a backend that a client sends; user code is bytes.

    Attributes
    ----------
    config : BackendConfig
        The options without ``user_config``; a policy that is user code is pickled.
    user_config : bytes or None
        ``dump_bytes`` of the argument of ``reconfigure``.
    version : str or None
        Names the code; None: the controller derives it from the code.
    user_version, prev_version : str or None
        The version that the user named, and the version that must be deployed already.
    env : str or None
        The environment, as `daskserve.options.environment.Environment.to_text` returns it.
    request_id : str
        The id of the call, the same when the call is retried.
    timeout_s, progress_timeout_s : float or None
        As in `daskserve.control.records.records.GoalRecord`.
    parts : tuple
        The content of the code's parcel, if the code is large; stays with the client.
    """

    tag: BackendTag
    code: bytes = field(repr=False)
    config: BackendConfig
    user_config: bytes | None = field(repr=False)
    actor_options: ActorOptions
    version: str | None
    user_version: str | None
    prev_version: str | None
    env: str | None = field(repr=False)
    request_id: str
    timeout_s: float | None
    progress_timeout_s: float | None
    parts: Annotated[tuple[Any, ...], Field(exclude=True)] = ()


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """One deployment of an application.

    Attributes
    ----------
    name : str
        Its name within the application; the tag of ``spec`` is `deployment_tag` of both.
    needs : tuple of str
        The tags of the deployments whose handles are among its arguments: they are up before it, and stop
        after it.
    actors : dict
        The tags of its deployment actors, by name; they are among ``needs``.
    actor_of : tuple of str
        For a deployment actor: the names of its deployment and of the actor. The tag also contains its
        version, so that old replicas keep the old actor.
    """

    name: str
    spec: BackendSpec
    python_methods: tuple[str, ...] = ()
    needs: tuple[BackendTag, ...] = ()
    actors: Mapping[str, BackendTag] = field(default_factory=dict)
    actor_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ApplicationSpec(Spec):
    """The definition of an application that a client sends.

    Attributes
    ----------
    route : str or None
        The route of the ingress; no other deployment of the application has one. None: by handle only.
    deployments : tuple of DeploymentSpec
        In the order of their dependencies; the ingress is the last.
    request_id : str
        The id of the call, the same when the call is retried.
    timeout_s, progress_timeout_s : float or None
        As in `daskserve.control.records.records.GoalRecord`.
    """

    name: str
    route: str | None
    deployments: tuple[DeploymentSpec, ...]
    request_id: str
    timeout_s: float | None
    progress_timeout_s: float | None = None

    @property
    def ingress(self) -> DeploymentSpec:
        """The deployment that handles requests to the application."""
        return self.deployments[-1]


_ADAPTERS: Mapping[type[Spec], TypeAdapter[Any]] = {
    BackendSpec: TypeAdapter(BackendSpec),
    ApplicationSpec: TypeAdapter(ApplicationSpec),
}
