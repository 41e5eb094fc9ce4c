"""The base class of request routers, and the classes that routers use, under Ray Serve's names.

See the page Routers of the documentation.
"""

from __future__ import annotations

from daskserve.data.caller.request_routers.hashing import ConsistentHashRouter
from daskserve.data.caller.request_routers.interface import (
    DeploymentID,
    FIFOMixin,
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestMetadata,
    RequestRouter,
    RunningReplica,
    SessionMixin,
)
from daskserve.data.caller.request_routers.load_balancing import LeastLatencyRouter, RoundRobinRouter
from daskserve.data.caller.request_routers.prefixes import PrefixAffinityRouter

__all__ = [
    "ConsistentHashRouter",
    "DeploymentID",
    "FIFOMixin",
    "LeastLatencyRouter",
    "LocalityMixin",
    "MultiplexMixin",
    "PendingRequest",
    "PrefixAffinityRouter",
    "ReplicaID",
    "ReplicaResult",
    "RequestMetadata",
    "RequestRouter",
    "RoundRobinRouter",
    "RunningReplica",
    "SessionMixin",
]
