"""Dask values as arguments in a cluster that has no Dask: they are computed in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

from dask.base import compute
from distributed import Future

from daskserve.cluster.dask.values import TakenValues
from daskserve.common.types import KeptPayload, Payload
from daskserve.errors import BadRequestError
from daskserve.payload.pickling import dump_bytes, load_bytes


class LocalValues:
    """The values of one call, sent directly; a `daskserve.cluster.protocols.base.RemoteValues`."""

    def __init__(self, payload: Payload, values: Sequence[Any]) -> None:
        self.payload = payload
        self.keys = b""
        self._values = values

    async def wait(self) -> None:
        self.keys = await asyncio.to_thread(lambda: dump_bytes([_compute(value) for value in self._values]))

    async def places(self) -> None:
        """Return None, because all values are in one process."""


class LocalTransfer(TakenValues):
    """Computes values in this process and sends them with the calls."""

    def hold(self, payload: Payload, values: Sequence[Any]) -> LocalValues:
        """Keep values that were taken out of a call's arguments."""
        return LocalValues(payload, values)

    async def fetch(self, keys: bytes) -> list[Any]:
        """Return the values that `take` took out."""
        found: list[Any] = load_bytes(keys)
        return found

    async def keep(self, result: Payload | KeptPayload) -> NoReturn:
        """Refuse, because there is no cluster."""
        raise BadRequestError("result='future' needs a Dask cluster, and this instance runs without one.")

    def as_read(self, future: Any) -> Any:
        """Return the future."""
        return future


def _compute(value: Any) -> Any:
    return value.result() if isinstance(value, Future) else compute(value)[0]
