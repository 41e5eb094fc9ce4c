"""The last replicas of a backend that were lost or failed, stored for the status of the next controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from daskserve.common.types import BackendTag


@dataclass(frozen=True, slots=True)
class DeathsRecord:
    """The last dead replicas of a backend; ``entries`` are the fields of `DeadReplica`."""

    KIND: ClassVar[str] = "deaths"

    backend: BackendTag
    entries: Sequence[Sequence[Any]] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.backend}"
