"""The models that replicas load from a ``model_repository``: their record, and the report of a replica."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from daskserve.common.types import BackendTag


class ModelState(enum.StrEnum):
    """The state of a version."""

    #: Not all replicas have loaded the version yet.
    LOADING = "LOADING"
    #: All replicas have loaded the version, and a rollout raises its share of the requests step by step.
    ROLLING_OUT = "ROLLING_OUT"
    READY = "READY"
    FAILED = "FAILED"
    #: The version's rollout was rolled back or aborted.
    TAKEN_BACK = "TAKEN_BACK"

    @property
    def is_given_up(self) -> bool:
        """Whether replicas should unload the version."""
        return self in (ModelState.FAILED, ModelState.TAKEN_BACK)


@dataclass(frozen=True, slots=True)
class ModelsRecord:
    """The versions of models that are wanted.

    Attributes
    ----------
    models : dict
        By name and version: ``state`` (a `ModelState`), ``attempt`` (the number of the attempt to load it),
        ``reason`` (why it failed), ``is_next`` (whether it becomes the default version once it is READY) and
        optionally ``by`` (the program that loaded it).
    defaults : dict
        The default version of each model that has one.
    attempts : int
        The number of the last attempt.
    rollouts : dict
        The last rollout of each model, as plain values of a
        `daskserve.control.records.rollout.RolloutState`.
    unloaded_by : str
        Id of the last call that unloaded something, which distinguishes a retry from a second call.
    """

    KIND: ClassVar[str] = "models"

    backend: BackendTag
    models: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    attempts: int = 0
    rollouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unloaded_by: str = ""

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.backend}"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The loaded models of a replica, its default versions, and its errors by ``name/version`` and attempt.

    Attributes
    ----------
    splits : dict
        The key of the rollout step by which the replica splits the requests of each model.
    loading : dict
        How long each version has been loading, in seconds, by ``name/version``.
    """

    loaded: Mapping[str, Collection[str]]
    defaults: Mapping[str, str]
    errors: Mapping[str, tuple[int, str]]
    splits: Mapping[str, str] = field(default_factory=dict)
    loading: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> ModelReport:
        """Return the report in a replica's health."""
        errors = {key: (int(attempt), str(why)) for key, (attempt, why) in facts["errors"].items()}
        splits = {name: str(each["key"]) for name, each in facts.get("splits", {}).items()}
        return cls(facts["loaded"], facts["defaults"], errors, splits, facts.get("loading", {}))

    def has(self, name: str, version: str) -> bool:
        """Return whether a version is loaded."""
        return version in self.loaded.get(name, ())


def rollout_tag(backend: BackendTag, model: str) -> BackendTag:
    """Return the name under which the requests of a model's rollout are counted; never a backend's tag."""
    return f"{backend}#model/{model}"
