"""The order of requests that wait."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from daskserve.options.fields.base import Options
from daskserve.options.fields.priority import MAX_PRIORITY

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class PriorityConfig(Options):
    """The order of requests that wait for a replica."""

    place: ClassVar[str] = "priority_config"

    header: str | None = Field(
        None,
        description="Name of the header with the priority of an HTTP request: a number, or one of "
        "``classes``; any other value counts as 0. None: HTTP requests have priority 0, because any client "
        "could choose its own.",
    )
    classes: dict[str, _Priority] = Field(
        default_factory=dict,
        max_length=100,
        description=(
            f'Names of priorities, such as ``{{"interactive": 10, "batch": -10}}``, from -{MAX_PRIORITY} to '
            f"{MAX_PRIORITY}; the highest goes first."
        ),
    )
    weights: dict[str, Annotated[float, Field(gt=0, le=1e6)]] | None = Field(
        None,
        max_length=200,
        description=(
            'Shares of waiting requests by priority, by name or number, such as ``{"interactive": 4, '
            '"batch": 1}``; others have 1. None: a lower priority waits while any higher one does.'
        ),
    )
    by_deadline: bool = Field(
        False,
        description="Whether, among requests of the same priority, the one with the earliest deadline "
        "goes first, instead of the oldest one.",
    )

    @field_validator("header")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        if value is not None and not _NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not a valid name of a header")
        return value

    @model_validator(mode="after")
    def _weights_are_of_priorities(self) -> PriorityConfig:
        for name in self.weights or ():
            self._number(name)
        return self

    def _number(self, name: str) -> int:
        if name in self.classes:
            return self.classes[name]
        try:
            number = int(name)
        except ValueError:
            known = ", ".join(sorted(self.classes)) or "none"
            raise ValueError(
                f"weights has {name!r}, which is neither a number nor in classes ({known})"
            ) from None
        if abs(number) > MAX_PRIORITY:
            raise ValueError(f"weights has {number}; priorities are from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        return number

    def published(self) -> dict[str, Any]:
        """Return the options that the processes that send requests need."""
        weights = {self._number(name): weight for name, weight in (self.weights or {}).items()}
        return {
            "header": self.header or "",
            "classes": self.classes,
            "weights": weights,
            "by_deadline": self.by_deadline,
        }
