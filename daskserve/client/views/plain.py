"""Views made of the plain values that the controller sends."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Self

from pydantic import TypeAdapter


class FromPlain:
    """Base class of the dataclasses that are views."""

    __slots__ = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the view of the controller's plain values; fields that this version lacks are ignored."""
        kind: Any = cls
        found: Self = _adapter(kind).validate_python(values)
        return found


@cache
def _adapter(cls: type[FromPlain]) -> TypeAdapter[Any]:
    return TypeAdapter(cls)
