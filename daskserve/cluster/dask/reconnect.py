"""Waiting for a scheduler that died, and is restarted at its address."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from distributed import Client

from daskserve.cluster.distributed_internals import connect_again_when, connect_comm, scheduler_address
from daskserve.common import settings
from daskserve.common.clock import Clock
from daskserve.common.formatting import shown
from daskserve.loops.tasks import TaskSet

logger = logging.getLogger("daskserve.connection")

#: Interval between two attempts to reach the scheduler, and the timeout of one.
PERIOD_S = 0.25
ATTEMPT_S = 2.0


async def identity_on(comm: Any) -> Mapping[str, Any]:
    """Return the identity of the server at the other end of a new connection."""
    await comm.write({"op": "identity", "reply": True})
    identity: Mapping[str, Any] = await comm.read()
    return identity


async def wait_for_scheduler(
    address: str,
    connection_args: Mapping[str, Any],
    grace_s: float,
    *,
    clock: Clock,
    is_awaited: Callable[[], bool],
) -> str:
    """Return the id of the scheduler at an address as soon as it answers.

    Raises
    ------
    OSError
        It did not answer within ``grace_s``, or ``is_awaited()`` became false.
    """
    deadline = clock.now() + grace_s
    while True:
        try:
            return await clock.wait_for(_id_of(address, connection_args), ATTEMPT_S)
        except OSError as error:
            if not is_awaited():
                raise
            if clock.now() > deadline:
                raise OSError(
                    f"The scheduler {address} did not come back within {shown(grace_s)} s."
                ) from error
        await clock.sleep(PERIOD_S)


async def _id_of(address: str, connection_args: Mapping[str, Any]) -> str:
    comm = await connect_comm(address, **connection_args)
    try:
        return str((await identity_on(comm))["id"])
    finally:
        comm.abort()


def keep_connected(
    client: Client,
    connection_args: Mapping[str, Any],
    resumptions: Callable[[], Iterable[Callable[[], Coroutine[Any, Any, None]]]],
    clock: Clock,
) -> None:
    """Make a Dask client that loses its scheduler connect to the next one at the same address.

    Parameters
    ----------
    resumptions
        Returns the coroutine functions to run after a reconnect, one for each user of the client.
    """
    resuming = TaskSet(logger)

    async def is_back() -> None:
        await wait_for_scheduler(
            scheduler_address(client) or "",
            connection_args,
            settings.scheduler().grace_s,
            clock=clock,
            is_awaited=lambda: client.status == "connecting",
        )

    def resume() -> None:
        resuming.cancel()  # the scheduler may be lost again before everything has resumed
        for each in resumptions():
            resuming.spawn(each(), "resume")

    connect_again_when(client, is_back, resume)
