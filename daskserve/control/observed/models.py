"""The models that a replica has, as it reports them with its health."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


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
