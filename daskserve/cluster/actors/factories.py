"""The factories of actors, which are in layers above this one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from daskserve.cluster.protocols.base import ActorFactory
from daskserve.common.types import ActorKind

#: Import path of the factory for each kind of actor.
ACTOR_FACTORIES: Mapping[ActorKind, str] = {
    ActorKind.CONTROLLER: "daskserve.actors:make_controller",
    ActorKind.PROXY: "daskserve.actors:ProxyActor",
    ActorKind.REPLICA: "daskserve.actors:make_replica",
    ActorKind.BUILDER: "daskserve.client.hosting.builder:Builder",
}


def load_factories() -> dict[ActorKind, ActorFactory]:
    """Import and return the factory of each kind of actor."""
    found: dict[ActorKind, ActorFactory] = {}
    for kind, path in ACTOR_FACTORIES.items():
        module, _, name = path.partition(":")
        found[kind] = getattr(importlib.import_module(module), name)
    return found
