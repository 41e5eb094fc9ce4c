"""A process's routes to workers, and its updates from the controller, both set by a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from daskserve.common.types import Reachability, SnapshotId, WorkerAddress
from daskserve.errors import ActorLostError


class ScriptedRoutes:
    """Routes to workers: direct, unless the test sets others."""

    def __init__(self) -> None:
        self.known: dict[WorkerAddress, Reachability | None] = {}
        #: The workers to which a connection was requested, and those that were broken off.
        self.dialled: list[WorkerAddress] = []
        self.broken_off: list[WorkerAddress] = []
        self._note: Callable[[WorkerAddress, Reachability], object] | None = None

    def watch(
        self, note: Callable[[WorkerAddress, Reachability], object], is_used: Callable[[WorkerAddress], bool]
    ) -> None:
        self._note, self.is_used = note, is_used

    def tell(self, worker: WorkerAddress, route: Reachability) -> None:
        self.known[worker] = route
        assert self._note is not None
        self._note(worker, route)

    def to(self, worker: WorkerAddress) -> Reachability | None:
        return self.known.get(worker, Reachability.DIRECT)

    async def connect(self, worker: WorkerAddress) -> None:
        self.dialled.append(worker)
        self.tell(worker, Reachability.NONE)
        raise ActorLostError(f"Worker {worker} cannot be reached", begun=False, is_disconnected=True)

    def break_off(self, worker: WorkerAddress) -> None:
        self.broken_off.append(worker)

    def broken(self) -> dict[WorkerAddress, Reachability]:
        return {}

    def close(self) -> None:
        pass


class ScriptedListener:
    """A subscription whose updates the test publishes; the values in ``known`` are already published."""

    is_started = True
    silent_since: float | None = None

    def __init__(self, known: Mapping[str, Any] | None = None) -> None:
        self._known = known
        self.watchers: dict[str, list[Callable[[Any], None]]] = {}
        self.left: list[Callable[[str], None]] = []
        self.ended: list[Callable[[], None]] = []
        self.asked = 0

    def watch(self, key: str, watcher: Callable[[Any], None]) -> Callable[[], None]:
        self.watchers.setdefault(key, []).append(watcher)
        if self._known is not None:
            watcher(self._known.get(key))
        return lambda: self.watchers[key].remove(watcher)

    def ask(self) -> None:
        self.asked += 1

    def on_worker_left(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self.left.append(callback)
        return lambda: self.left.remove(callback)

    def on_ended(self, callback: Callable[[], None]) -> None:
        self.ended.append(callback)

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.watchers.clear()

    async def wait_for_snapshot(self, snapshot_id: SnapshotId, timeout_s: float) -> None:
        pass

    def tell(self, key: str, value: Any) -> None:
        for watcher in list(self.watchers.get(key, ())):
            watcher(value)
