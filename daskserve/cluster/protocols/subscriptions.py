"""A process's subscription to an instance, as the layers above use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from daskserve.common.types import SnapshotId, WorkerAddress


class Listener(Protocol):
    """A process's subscription to an instance; see `daskserve.cluster.long_poll.LongPollClient`."""

    @property
    def is_started(self) -> bool:
        """Whether `start` has completed."""

    async def start(self) -> None:
        """Subscribe; idempotent. No change after it returns is missed."""

    async def stop(self) -> None:
        """Unsubscribe and clear all state; idempotent."""

    def watch(self, key: str, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Call ``watcher(value)`` now, if known, and on every change; return a function that stops this."""

    def on_worker_left(self, callback: Callable[[WorkerAddress], None]) -> Callable[[], None]:
        """Call ``callback(worker)`` when a worker leaves the scheduler; return a function that stops this."""

    def on_ended(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` when the instance has been shut down."""

    async def wait_for_snapshot(self, snapshot_id: SnapshotId, timeout_s: float) -> None:
        """Return when this process has applied that change or a newer one; raise `TimeoutError` if late."""

    @property
    def silent_since(self) -> float | None:
        """Time since which fetches from the controller have failed; None if the last one succeeded."""

    def ask(self) -> None:
        """Fetch from the controller now, without an update message."""
