"""The spec of an application: what `daskserve.run` asks for, as it travels to the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from daskserve.common.types import DEFAULT_APPLICATION, BackendTag, tag_part
from daskserve.options.backend_spec import BackendSpec


def deployment_tag(application: str, deployment: str) -> BackendTag:
    """Return the tag of an application's deployment, which is its backend's tag and its endpoint's name.

    The deployments of the default application have their own names; those of any other one are told apart by
    its name.
    """
    name = tag_part(deployment)
    return name if application == DEFAULT_APPLICATION else f"{tag_part(application)}/{name}"


def actor_tag(application: str, deployment: str, actor: str) -> BackendTag:
    """Return the tag of a deployment's actor, to which the digest of its version is added."""
    return f"{deployment_tag(application, deployment)}:{actor}::"


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
        For a deployment actor: the names of its deployment and of the actor. The tag then also tells its
        version apart, so that old replicas keep the old actor.
    """

    name: str
    spec: BackendSpec
    python_methods: tuple[str, ...] = ()
    needs: tuple[BackendTag, ...] = ()
    actors: Mapping[str, BackendTag] = field(default_factory=dict)
    actor_of: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return the spec as plain values, without the parts of a parcel."""
        return {
            "name": self.name,
            "spec": self.spec.to_plain(),
            "python_methods": list(self.python_methods),
            "needs": list(self.needs),
            "actors": dict(self.actors),
            "actor_of": list(self.actor_of),
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """Return the spec that `to_plain` gave."""
        return cls(
            name=values["name"],
            spec=BackendSpec.from_plain(values["spec"]),
            python_methods=tuple(values["python_methods"]),
            needs=tuple(values["needs"]),
            actors=dict(values.get("actors", {})),
            actor_of=tuple(values.get("actor_of", ())),
        )


@dataclass(frozen=True, slots=True)
class ApplicationSpec:
    """An application as a client asks for it.

    Attributes
    ----------
    route : str or None
        The route of the ingress; no other deployment of the application has one. None: by handle only.
    deployments : tuple of DeploymentSpec
        Each after those that it needs, so the ingress is the last.
    request_id : str
        Tells the retry of a call from a second call.
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
        """The deployment that requests to the application reach."""
        return self.deployments[-1]

    def to_plain(self) -> dict[str, Any]:
        """Return the spec as plain values, without the parts of parcels."""
        return {
            "name": self.name,
            "route": self.route,
            "deployments": [each.to_plain() for each in self.deployments],
            "request_id": self.request_id,
            "timeout_s": self.timeout_s,
            "progress_timeout_s": self.progress_timeout_s,
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """Return the spec that `to_plain` gave."""
        deployments = tuple(DeploymentSpec.from_plain(each) for each in values["deployments"])
        return cls(**{**values, "deployments": deployments})
