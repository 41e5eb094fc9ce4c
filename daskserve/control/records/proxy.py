"""The records of HTTP proxies; see `daskserve.control.records.records`."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from daskserve.common.types import ActorAddress, WorkerAddress


@dataclass(frozen=True, slots=True)
class ProxyRecord:
    """One HTTP proxy, which runs on a worker or waits for one.

    Attributes
    ----------
    worker : str or None
        None while the proxy waits for another worker, after the loss of its own.
    port : int
        The port it listens on, which its replacement uses too.
    home, home_port : str, int
        With HeadOnly, the address to which the proxy returns; empty while it is there.
    start_id : str
        The id of the instance's start during which it was placed.
    may_move : bool
        Whether it may choose another free port. Its port was chosen automatically before this start of the
        instance, so another program may use it by now.
    is_leaving : bool
        Whether the proxy is being replaced or removed. It stops accepting once its successor listens. The
        record is removed when its last request has ended.
    """

    KIND: ClassVar[str] = "proxy"

    name: str
    worker: WorkerAddress | None
    host: str
    incarnation: int
    port: int
    home: str = ""
    home_port: int = 0
    start_id: str = ""
    is_leaving: bool = False
    may_move: bool = False

    @property
    def tag(self) -> str:
        """The name; for a leaving proxy, whose successor has the name, also the incarnation."""
        return f"{self.name}@{self.incarnation}" if self.is_leaving else self.name

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.tag}"

    def address(self, instance: str) -> ActorAddress:
        """Return the address of the proxy's actor; raise `ValueError` while it has no worker."""
        if self.worker is None:
            raise ValueError(f"proxy {self.tag} has no worker")
        # The same worker may run the successor too.
        return ActorAddress(f"{instance}/proxy/{self.name}/{self.incarnation}", self.worker, self.incarnation)


class Proxies(dict[str, ProxyRecord]):
    """The records of all proxies by tag, with an index by worker. Only `State.apply` changes it."""

    def __init__(self) -> None:
        super().__init__()
        self._on: dict[WorkerAddress, dict[str, None]] = {}

    def keep(self, proxy: ProxyRecord) -> None:
        """Add a record."""
        self[proxy.tag] = proxy
        if proxy.worker is not None:
            self._on.setdefault(proxy.worker, {})[proxy.tag] = None

    def forget(self, tag: str) -> None:
        """Remove a record, if it is there."""
        proxy = self.pop(tag, None)
        if proxy is not None and proxy.worker is not None:
            tags = self._on[proxy.worker]
            del tags[tag]
            if not tags:
                del self._on[proxy.worker]

    def on(self, worker: WorkerAddress) -> list[ProxyRecord]:
        """Return the proxies on a worker, including leaving ones."""
        return [self[tag] for tag in self._on.get(worker, ())]

    @property
    def workers(self) -> Set[WorkerAddress]:
        """The workers that hold proxies, including leaving ones."""
        return self._on.keys()
