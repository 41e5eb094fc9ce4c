"""The record of the models that replicas load from a ``model_repository``, and what a replica has of them."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from daskserve.common.types import BackendTag


class ModelState(enum.StrEnum):
    """The state of a version: wanted and not in all replicas yet, in all of them, or given up."""

    LOADING = "LOADING"
    READY = "READY"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class ModelsRecord:
    """The versions of models that are wanted.

    Attributes
    ----------
    models : dict
        By name and version: ``state`` (a `ModelState`), ``attempt`` (the number of the attempt to load it),
        ``reason`` (why it failed) and ``is_next`` (whether it becomes the default version once it is READY).
    defaults : dict
        The default version of each model that has one.
    attempts : int
        The number of the last attempt.
    """

    KIND: ClassVar[str] = "models"

    backend: BackendTag
    models: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    attempts: int = 0

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.backend}"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What one replica has loaded, its default versions, and its errors by ``name/version`` and attempt."""

    loaded: Mapping[str, Collection[str]]
    defaults: Mapping[str, str]
    errors: Mapping[str, tuple[int, str]]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> ModelReport:
        """Return the report in a replica's health."""
        errors = {key: (int(attempt), str(why)) for key, (attempt, why) in facts["errors"].items()}
        return cls(facts["loaded"], facts["defaults"], errors)

    def has(self, name: str, version: str) -> bool:
        """Return whether a version is loaded."""
        return version in self.loaded.get(name, ())
