"""How user code in a child process reaches the Dask cluster.

Nothing here imports Dask until user code does, or calls a handle or a client: most code does not need it, and
the import takes longer than the rest of a child's start.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskserve.cluster.worker.worker_view import CurrentClient, WorkerView
from daskserve.common.types import InstanceName
from daskserve.errors import ClusterUnreachableError, InstanceError
from daskserve.internals.current_worker import answer_get_worker
from daskserve.payload.parcels import Parcel
from daskserve.payload.pickling import load_bytes

if TYPE_CHECKING:
    from distributed import Client, Security

    from daskserve.cluster.dask.connection import DaskConnection
    from daskserve.cluster.worker.user_clients import UserClients


#: The attributes of `distributed.get_worker` for a worker in another process.
FACTS = ("address", "name", "id", "local_directory")


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The facts with which a child connects to the same Dask cluster as its worker.

    Attributes
    ----------
    address : str
        The scheduler's address; empty if other processes cannot connect to it.
    security : bytes
        The pickled `distributed.Security`: unpickling it imports distributed.
    worker : mapping
        The attributes of the worker in `distributed.get_worker`; empty for none.
    timeout_s : float
        How long to wait for the scheduler.
    """

    address: str = ""
    security: bytes = b""
    worker: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 5.0


class ChildView:
    """The view of the cluster for code in a child, so that handles and clients work there.

    The child's own Dask client connects on first use.
    """

    def __init__(self, instance: InstanceName, access: ClusterAccess, parts: Sequence[Any] = ()) -> None:
        self.instance = instance
        #: See `daskserve.cluster.protocols.base.Process.shared`.
        self.shared: dict[str, Any] = {}
        self._parts = parts
        self._access = access
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._loop = asyncio.get_running_loop()
        self._user_clients: UserClients | None = None

    @property
    def connection(self) -> DaskConnection:
        """The child's connection to the cluster.

        Raises
        ------
        InstanceError
            The cluster runs in a single process, to which others cannot connect.
        ClusterUnreachableError
            The scheduler does not answer.
        """
        from daskserve.cluster.dask.connection import connection_of

        with self._lock:
            if self._client is None:
                self._client = self._connect()
                connection_of(self._client).values.here = self._access.worker.get("address", "")
            return connection_of(self._client)

    async def fetch_parcel(self, code: str, parcel: Parcel) -> Sequence[Any]:
        """Return the parts of the parcel that was sent with the start, only once."""
        parts, self._parts = self._parts, ()
        return parts

    def answer_get_worker(self) -> None:
        """Let Dask's ``get_worker()`` and ``get_client()`` work in this process."""
        access, find = self._access, self._find_user_client
        if access.worker:
            view = WorkerView(access.worker, access.address, find, lambda: self.connection)
            answer_get_worker(view, CurrentClient(find))

    def _find_user_client(self) -> Client:
        from daskserve.cluster.worker.user_clients import UserClients

        if self._user_clients is None:
            self._user_clients = UserClients(*self._address_and_security(), self._loop)
        return self._user_clients.current()

    def _address_and_security(self) -> tuple[str, Security | None]:
        if not self._access.address:
            raise InstanceError(
                "Code in a child process cannot connect to this cluster, which runs within a single "
                "process; use isolation='thread', or a cluster of processes."
            )
        return self._access.address, load_bytes(self._access.security)

    def _connect(self) -> Client:
        import dask.config

        from daskserve.cluster.distributed_internals import ScatteringClient

        address, security = self._address_and_security()
        dask.config.set({"scheduler-address": address})  # for a `Client()` in user code
        try:
            return ScatteringClient(
                address,
                security=security,
                timeout=self._access.timeout_s,
                set_as_default=False,
                name="daskserve-child",
            )
        except OSError as error:
            raise ClusterUnreachableError(
                f"The Dask scheduler at {address} did not answer: {error}"
            ) from error

    def close(self) -> None:
        """Close the connection, if there is one."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            from daskserve.cluster.dask.connection import CLOSE_S, connection_of

            connection = connection_of(client)
            with suppress(TimeoutError):
                connection.sync(connection.close(), timeout_s=CLOSE_S)
                client.close(timeout=CLOSE_S)
