"""Finds the class of a router by its name, its import path, or its pickle."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from daskserve.data.caller.request_routers.hashing import ConsistentHashRouter
from daskserve.data.caller.request_routers.interface import RequestRouter
from daskserve.data.caller.request_routers.load_balancing import (
    LeastLatencyRouter,
    RoundRobinRouter,
    SameHostRouter,
)
from daskserve.data.caller.request_routers.prefixes import PrefixAffinityRouter
from daskserve.options.fields.pickled import PICKLED
from daskserve.payload.importing import import_definition
from daskserve.payload.pickling import load_bytes

#: The built-in routers by their names in options; see `daskserve.options.routing.request_router`.
BUILT_IN: Mapping[str, type[RequestRouter]] = MappingProxyType(
    {
        "RoundRobin": RoundRobinRouter,
        "ConsistentHash": ConsistentHashRouter,
        "LeastLatency": LeastLatencyRouter,
        "SameHost": SameHostRouter,
        "PrefixAffinity": PrefixAffinityRouter,
    }
)


def load_router(named: str) -> type[RequestRouter]:
    """Return the class of a user's router; runs in the router's thread.

    Raises
    ------
    TypeError
        The loaded object is not a router class.
    Exception
        Whatever the import or the unpickling of user code raises.
    """
    found: Any = _unpickled(named) if named.startswith(PICKLED) else import_definition(named)
    if not (isinstance(found, type) and callable(getattr(found, "choose_replicas", None))):
        raise TypeError(f"{found!r} is not a class with a method choose_replicas")
    if not issubclass(found, RequestRouter):
        raise TypeError(f"{found.__name__} does not derive from daskserve.request_router.RequestRouter")
    return found


def _unpickled(text: str) -> Any:
    return load_bytes(base64.b64decode(text.removeprefix(PICKLED)))
