"""Dask values as arguments in a cluster that has no Dask: they are computed in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dask.base import compute
from distributed import Future

from daskserve.payload import dump_bytes
from daskserve.types import Payload


class LocalValues:
    """The values of one call, which travel themselves; a `daskserve.cluster.base.RemoteValues`."""

    def __init__(self, payload: Payload, values: Sequence[Any]) -> None:
        self.payload = payload
        self.keys = b""
        self._values = values

    async def wait(self) -> None:
        self.keys = await asyncio.to_thread(lambda: dump_bytes([_compute(value) for value in self._values]))


def _compute(value: Any) -> Any:
    return value.result() if isinstance(value, Future) else compute(value)[0]
