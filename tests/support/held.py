"""Counts what objects hold, to find what they do not forget."""

from __future__ import annotations

from collections import deque
from typing import Any

CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def held_items(root: Any) -> int:
    """Return the number of items in all containers that an object of daskserve holds, directly or not."""
    count, seen, left = 0, set[int](), [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (type, str, bytes)):
            continue
        seen.add(id(each))
        if isinstance(each, CONTAINERS):
            count += len(each)
            left += [*each, *each.values()] if isinstance(each, dict) else each
        if type(each).__module__.startswith("daskserve."):
            names = (name for cls in type(each).__mro__ for name in getattr(cls, "__slots__", ()))
            left += [getattr(each, name, None) for name in names]
            left += vars(each).values() if hasattr(each, "__dict__") else ()
    return count
