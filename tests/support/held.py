"""Shows what objects hold, to find what they do not forget."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from types import MethodType
from typing import Any

CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def held(root: Any, apart_from: Collection[str] = ()) -> Counter[str]:
    """Return the numbers of items in the containers that an object of daskserve holds, directly or not.

    The keys are the attributes that lead to a container; ``apart_from`` names attributes not to follow.
    """
    found, seen, left = Counter[str](), set[int](), deque([("", root)])
    while left:
        path, each = left.popleft()
        if id(each) in seen or isinstance(each, (type, str, bytes)):
            continue
        seen.add(id(each))
        if isinstance(each, CONTAINERS):
            found[path] += len(each)
            items = [*each, *each.values()] if isinstance(each, dict) else each
            left += [(f"{path}[]", item) for item in items]
        if isinstance(each, MethodType):
            left.append((path, each.__self__))
        if type(each).__module__.startswith("daskserve."):
            names = [name for cls in type(each).__mro__ for name in getattr(cls, "__slots__", ())]
            names += getattr(each, "__dict__", {})
            left += [
                (f"{path}.{name}", getattr(each, name, None)) for name in names if name not in apart_from
            ]
    return +found
