"""How user code in a child process reaches the Dask cluster.

Nothing here imports Dask until user code does, or calls a handle or a client: most code does not need it, and
the import takes longer than the rest of a child's start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from daskserve.errors import ClusterUnreachableError, InstanceError
from daskserve.internals.current_worker import answer_get_worker
from daskserve.loops.event_loop import running_loop
from daskserve.payload.parcels import Parcel
from daskserve.payload.pickling import load_bytes
from daskserve.types import InstanceName

if TYPE_CHECKING:
    from distributed import Client, Security

    from daskserve.cluster.link import DaskLink
    from daskserve.cluster.worker.user_clients import UserClients


#: What the stand-in of a worker has of it.
FACTS = ("address", "name", "id", "local_directory")


class WorkerStandIn:
    """What `distributed.get_worker` returns in a process whose worker is another one.

    It has the attributes that are the same in both processes: the worker's ``address``, ``name``, ``id`` and
    ``local_directory``, and ``scheduler.address``.
    """

    def __init__(self, facts: Mapping[str, Any], scheduler: str, get_client: Callable[[], Client]) -> None:
        self.scheduler = SimpleNamespace(address=scheduler)
        self._facts = facts
        self._find_client = get_client

    def __bool__(self) -> bool:
        return False  # a client would look for values in a worker of its own process

    def __repr__(self) -> str:
        return f"<WorkerStandIn of {self._facts.get('address')}>"

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("_facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(
            f"This code runs in a process of its own, so get_worker() has no {name!r}; it has "
            f"{', '.join(sorted(facts))} and scheduler.address. Use isolation='thread' for code that needs "
            "more of its worker."
        )

    def _get_client(self, timeout: float | None = None) -> Client:
        return self._find_client()


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
        What a `WorkerStandIn` knows of the worker; empty for none.
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
        self._parts = parts
        self._access = access
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._user_clients: UserClients | None = None

    @property
    def link(self) -> DaskLink:
        """The child's link to the cluster.

        Raises
        ------
        InstanceError
            The cluster runs in a single process, to which others cannot connect.
        ClusterUnreachableError
            The scheduler does not answer.
        """
        from daskserve.cluster.link import link_of

        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return link_of(self._client)

    async def fetch_parcel(self, code: str, parcel: Parcel) -> Sequence[Any]:
        """Return the parts of the parcel that came with the start, once."""
        parts, self._parts = self._parts, ()
        return parts

    def answer_get_worker(self) -> None:
        """Let Dask's ``get_worker()`` and ``get_client()`` work in this process."""
        access = self._access
        if access.worker:
            answer_get_worker(WorkerStandIn(access.worker, access.address, self._find_client))

    def _find_client(self) -> Client:
        """Return the client for user code: that of the running loop, or one that blocks."""
        if running_loop() is None:
            return self.link.client
        from daskserve.cluster.worker.user_clients import UserClients

        if self._user_clients is None:
            self._user_clients = UserClients(*self._address_and_security())
        return self._user_clients.of_running_loop()

    def _address_and_security(self) -> tuple[str, Security | None]:
        if not self._access.address:
            raise InstanceError(
                "Code in a child process cannot connect to this cluster, which runs within a single "
                "process; use isolation='thread', or a cluster of processes."
            )
        return self._access.address, load_bytes(self._access.security)

    def _connect(self) -> Client:
        import dask.config
        from distributed import Client

        from daskserve.cluster.link import default_client

        address, security = self._address_and_security()
        dask.config.set({"scheduler-address": address})  # for a `Client()` in user code
        try:
            return Client(
                address,
                security=security,
                timeout=self._access.timeout_s,
                set_as_default=default_client() is None,
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
            from daskserve.cluster.link import link_of

            link = link_of(client)
            link.sync(link.close())
            client.close()
