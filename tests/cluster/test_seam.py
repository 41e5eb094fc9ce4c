"""The in-process cluster and the real one both answer to the protocols that the layers above use.

``scripts/check`` checks the types of this file, which is the proof; the test below keeps the file in use.
"""

from __future__ import annotations

from daskserve.cluster.dask.cluster import DaskCluster, RemoteStore
from daskserve.cluster.dask.connection import DaskConnection
from daskserve.cluster.local.connection import LocalConnection
from daskserve.cluster.local.process import LocalProcess
from daskserve.cluster.long_poll import LongPollClient
from daskserve.cluster.protocols.base import ClientConnection, InstanceStore, Listener, Process, Store
from daskserve.cluster.store.opening import MemoryStore


def processes(real: DaskCluster, local: LocalProcess) -> tuple[Process, Process]:
    return real, local


def connections(real: DaskConnection, local: LocalConnection) -> tuple[ClientConnection, ClientConnection]:
    return real, local


def stores(remote: RemoteStore, memory: MemoryStore) -> tuple[Store, InstanceStore]:
    return remote, memory


def listeners(client: LongPollClient) -> Listener:
    return client


def test_the_real_and_the_local_cluster_implement_the_protocols() -> None:
    for protocol, kinds in {
        Process: (DaskCluster, LocalProcess),
        ClientConnection: (DaskConnection, LocalConnection),
    }.items():
        names = {name for each in protocol.__mro__ for name in vars(each) if not name.startswith("_")}
        for kind in kinds:
            # The attributes that `__init__` sets are not attributes of the class.
            made = (vars(each).get("__init__") for each in kind.__mro__[:-1])
            known = {*dir(kind), *(name for each in made if each for name in each.__code__.co_names)}
            assert names - known == set(), kind
