"""The values that many spans have in common. This module needs no OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

#: Maximum number of templates in the cache.
MAX_KNOWN = 1024
_NOTHING: Mapping[str, Any] = MappingProxyType({})

K = TypeVar("K")
P = ParamSpec("P")


class SpanTemplate:
    """The name, the kind and the attributes of many spans. Immutable.

    A span with a template takes less time and memory than one with its own values, and the values are encoded
    only once.
    """

    __slots__ = ("encoded", "kind", "name", "values")

    def __init__(self, name: str, kind: Any, values: Mapping[str, Any] = _NOTHING) -> None:
        self.name = name
        self.kind = kind
        self.values = values
        #: The encoded values; empty until the encoder has seen the template.
        self.encoded = b""


class SpanTemplates:
    """The templates of an instance, by key. Any thread may call this."""

    def __init__(self) -> None:
        self._known: dict[Any, SpanTemplate] = {}

    def get(
        self, key: K, make: Callable[Concatenate[K, P], SpanTemplate], *args: P.args, **kwargs: P.kwargs
    ) -> SpanTemplate:
        """Return the template for a key; ``make(key, ...)`` returns a new one."""
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()  # spans that use a template keep a reference to it
            found = self._known[key] = make(key, *args, **kwargs)
        return found


class ReplicaTemplates:
    """The templates of the spans of one replica.

    Parameters
    ----------
    facts : mapping
        The attributes of all requests of the replica.
    """

    def __init__(self, deployment: str, facts: Mapping[str, Any]) -> None:
        self._deployment = deployment
        self._facts = facts
        #: The templates of requests, by the method of a call or None for HTTP, and those of user code.
        self.requests, self.code = SpanTemplates(), SpanTemplates()

    def name(self, step: str, method: str | None) -> str:
        """Return the name of a step of the requests to a method."""
        return f"{step} {self._deployment}" if method is None else f"{step} {self._deployment}.{method}"

    def values(self, step: str, method: str | None) -> dict[str, Any]:
        """Return the attributes that a step of the requests to a method has in common."""
        found = {**self._facts, "daskserve.step": step}
        return found if method is None else {**found, "rpc.method": method}
