"""Ending an instance."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from daskserve.client.instance.calls import run_on
from daskserve.cluster.protocols.base import ClientConnection
from daskserve.common.types import InstanceName
from daskserve.data.caller.routing.waiting_calls import wait_until_sent
from daskserve.errors import NotRunningError
from daskserve.loops.blocking import finish
from daskserve.telemetry.collector import PROCESS

logger = logging.getLogger("daskserve.client.client")

#: Timeout of an answer of the scheduler.
SHUTDOWN_S = 15.0
#: Timeout for ending an instance, even if the connection's event loop has stopped.
END_S = SHUTDOWN_S + 5.0


async def end_instance(
    cluster_connection: ClientConnection,
    instance: InstanceName,
    *,
    asynchronous: bool,
    start_id: str | None = None,
    drains: bool = False,
    if_alone: bool = False,
) -> None:
    """End an instance; do nothing if the instance or the cluster has already ended.

    Parameters
    ----------
    start_id
        End only an instance that was started under this id.
    drains
        Whether the requests under way complete first, unless the caller is interrupted: then the instance
        ends at once.
    if_alone
        Whether to leave an instance that other programs use.
    """
    cluster_connection.release_default(instance)
    run = partial(run_on, cluster_connection, asynchronous=asynchronous)

    async def end() -> None:
        if not cluster_connection.is_open:
            return
        try:
            await run(_end(cluster_connection, instance, start_id, if_alone=if_alone), timeout_s=END_S)
        except TimeoutError:
            logger.warning("Instance %s did not end within %s s", instance, END_S)

    try:
        if cluster_connection.is_open and drains:
            await run(_drain(cluster_connection, instance))
        await end()
    except (KeyboardInterrupt, asyncio.CancelledError):
        # A second Ctrl-C skips the draining, but the instance still ends.
        await end()
        raise
    finally:
        await cluster_connection.instance_ended(instance, asynchronous=asynchronous)


def abandon_instance(
    cluster_connection: ClientConnection, instance: InstanceName, *, if_alone: bool = False
) -> None:
    """End an instance whose owner was garbage collected, or whose program ends; callable in any thread."""
    if cluster_connection.runs_here():
        # If the garbage collector frees an owner on the connection's own loop, this must not block the loop.
        cluster_connection.spawn(
            end_instance(cluster_connection, instance, asynchronous=True, if_alone=if_alone)
        )
    else:
        finish(end_instance(cluster_connection, instance, asynchronous=False, if_alone=if_alone))


async def _end(
    cluster_connection: ClientConnection, instance: InstanceName, start_id: str | None, *, if_alone: bool
) -> None:
    message = {} if start_id is None else {"start_id": start_id}
    if start_id is None:
        await cluster_connection.drop_cluster(instance)
    try:
        async with asyncio.timeout(SHUTDOWN_S):
            if if_alone and not await cluster_connection.started.is_alone(instance):
                return
            has_ended = await cluster_connection.ask("end_instance", instance=instance, **message)
    except NotRunningError:
        pass
    except (OSError, TimeoutError) as error:
        logger.warning("Instance %s did not end cleanly: %r", instance, error)
    else:
        if has_ended:
            await cluster_connection.drop_cluster(instance)
            PROCESS.forget(instance)


async def _drain(cluster_connection: ClientConnection, instance: InstanceName) -> None:
    try:
        await wait_until_sent(cluster_connection.cluster(instance))
        is_drained = False
        while not is_drained:
            async with asyncio.timeout(SHUTDOWN_S):
                is_drained = await cluster_connection.ask("drain_instance", instance=instance)
    except NotRunningError:
        pass
    except (OSError, TimeoutError) as error:
        logger.warning("Instance %s ends without draining: %r", instance, error)
