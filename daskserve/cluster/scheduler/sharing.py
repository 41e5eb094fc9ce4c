"""Instances that several programs use, and that therefore outlive the program that started them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.common.types import InstanceName

logger = logging.getLogger("daskserve.supervisor")


async def share_instance(
    known: Callable[[InstanceName], Instance], hosts: HostRegistry, instance: InstanceName
) -> None:
    """Let an instance outlive its owner, because another program has deployed something on it."""
    entry = known(instance)
    if entry.owner is None:
        return
    logger.info("Several programs use instance %s, so it does not end with its owner", instance)
    entry.owner = None
    if entry.draining is None:
        entry.spare()
    hosts.starts[instance] = {**hosts.starts[instance], "owner": None}
    await hosts.entrust(instance)
