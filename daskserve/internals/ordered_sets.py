"""Sets that are pickled in the same order in each process.

Python's hashes of texts and the addresses of classes differ in each process, and so does the order of a set
that contains them. The pickler writes sets itself, without a hook, so they are replaced where code holds
them: in variables of modules and functions, and in attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

#: Types whose order in a set does not matter: the digest of code sorts them.
PLAIN = frozenset({int, str, float, bool, bytes, type(None)})
#: Up to this depth of dictionaries, and this number of items of each dictionary or set, sets are replaced.
SEARCHED_DEPTH = 3
SEARCHED_ITEMS = 1000
#: Modules whose objects have a ``repr`` that is the same in each process.
_WITH_REPR = frozenset({"datetime", "decimal", "fractions", "ipaddress", "pathlib", "uuid"})


class OrderedSet:
    """Stands for a set in a pickle. It is unpickled as a plain set."""

    __slots__ = ("items", "kind")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind = kind
        self.items = items

    def __reduce__(self) -> tuple[Any, ...]:
        return self.kind, (self.items,)


class SetOrder:
    """Replaces the sets of one pickle. A set that several functions use stays one set."""

    def __init__(self) -> None:
        #: By the id of a set or dictionary, with the object, which keeps its id.
        self._made: dict[int, tuple[Any, Any]] = {}

    def ordered(self, value: Any, depth: int = SEARCHED_DEPTH) -> Any:
        """Return what to pickle instead of a value: an `OrderedSet`, a dictionary with some, or the value."""
        kind = type(value)
        if kind is not set and kind is not frozenset and (kind is not dict or not depth):
            return value
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        made = self.order(value, depth - 1) if kind is dict else _ordered_set(value, kind)
        if made is not value:
            self._made[id(value)] = value, made
        return made

    def order(self, values: dict[Any, Any], depth: int = SEARCHED_DEPTH) -> dict[Any, Any]:
        """Return a dictionary with its sets replaced; the same dictionary if it has none to replace."""
        if len(values) > SEARCHED_ITEMS:
            return values
        changed = {
            name: each for name, value in values.items() if (each := self.ordered(value, depth)) is not value
        }
        return {**values, **changed} if changed else values

    def order_all(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a tuple with its sets replaced."""
        return tuple(map(self.ordered, values))


def _ordered_set(value: Any, kind: type) -> Any:
    if len(value) > SEARCHED_ITEMS or all(type(each) in PLAIN for each in value):
        return value
    keys = {id(each): _key_of(each) for each in value}
    if None in keys.values():
        return value  # no order is the same in each process
    return OrderedSet(kind, sorted(value, key=lambda each: str(keys[id(each)])))


def _key_of(item: Any) -> str | None:
    """Return a text by which an item is sorted, which is the same in each process; None if there is none."""
    kind = type(item)
    if kind in PLAIN:
        return f"{kind.__name__} {item!r}"
    if isinstance(item, Enum):
        return f"{kind.__module__}.{kind.__qualname__} {item.name}"
    if isinstance(item, (type, FunctionType, BuiltinFunctionType)):
        return f"{item.__module__}.{item.__qualname__}"
    if kind is tuple:
        return _joined(map(_key_of, item))
    if kind is frozenset:
        keys = [_key_of(each) for each in item]
        return None if None in keys else _joined(sorted(map(str, keys)))
    return repr(item) if kind.__module__ in _WITH_REPR else None


def _joined(keys: Iterable[str | None]) -> str | None:
    found = list(keys)
    return None if None in found else repr(found)
