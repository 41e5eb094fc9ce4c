"""Long poll: notifies routers and proxies of changes.

The controller publishes values by key. A `LongPollHost` numbers every change, publishes it on the instance's
topic, and answers fetches. A `LongPollClient`, one per process and instance, listens and keeps the newest
value of each key that has a watcher in the process.

Topics may lose messages (a reconnect does not replay them), so every message carries the epoch of its
controller and a counter without gaps. On a gap, a newer epoch or a long silence, the client fetches. It
ignores messages of older epochs, which come from controllers that were replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgpack

from daskserve.cluster.protocols.base import Cluster
from daskserve.common.clock import Clock
from daskserve.common.types import SnapshotId
from daskserve.errors import NotRunningError, ServeError, UnavailableError
from daskserve.telemetry.collector import PROCESS
from daskserve.telemetry.histogram import LatencyHistogram
from daskserve.telemetry.table import MetricSample

logger = logging.getLogger("daskserve.long_poll")

#: Maximum size of a value that is part of its update message; listeners fetch larger values.
INLINE_BYTES = 4096
#: Time without messages after which a listener checks whether it missed one.
SILENCE_S = 10.0
#: Timeout of a fetch, because the controller may hang; then the listener retries.
FETCH_S = 2.0
#: Maximum duration of a blocking `LongPollHost.listen_for_change`; after it, the caller calls again.
LISTEN_S = 30.0

UPDATE, WORKERS, CONTROLLER, ENDED = "update", "workers", "controller", "ended"

Watcher = Callable[[Any], None]


class LongPollHost:
    """The publishing side, inside the controller."""

    def __init__(self, epoch: int, publish: Callable[[Any], None], clock: Clock) -> None:
        self._epoch = epoch
        self._publish = publish
        self._clock = clock
        self._counter = 0
        self._values: dict[str, tuple[int, Any]] = {}
        self._changed = asyncio.Event()
        #: Number of `listen_for_change` calls that wait.
        self.waiting = 0

    @property
    def snapshot_id(self) -> SnapshotId:
        """The number of the newest change."""
        return (self._epoch, self._counter)

    def notify(self, values: Mapping[str, Any]) -> SnapshotId:
        """Publish new values as one change and return its number; None removes a key.

        Keys whose value did not change are left out. If no key is left, nothing is published.
        """
        changed = {key: value for key, value in values.items() if not self._is_published(key, value)}
        if not changed:
            return self.snapshot_id
        self._counter += 1
        changes = []
        for key, value in changed.items():
            if value is None:
                del self._values[key]
            else:
                self._values[key] = (self._counter, value)
            is_inline = len(msgpack.packb(value)) <= INLINE_BYTES
            changes.append((key, is_inline, value if is_inline else None))
        self._publish(
            {
                "kind": UPDATE,
                "epoch": self._epoch,
                "counter": self._counter,
                "changes": changes,
                "at": self._clock.wall(),
            }
        )
        waiters, self._changed = self._changed, asyncio.Event()
        waiters.set()
        return self.snapshot_id

    def fetch(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the newest values of the given keys; None for keys that were never published."""
        values = {key: self._values.get(key, (0, None))[1] for key in keys}
        return {"epoch": self._epoch, "counter": self._counter, "values": values}

    async def listen_for_change(self, snapshot_ids: Mapping[str, SnapshotId | None]) -> dict[str, Any]:
        """Return the keys whose value is newer than their given snapshot, with their values.

        Returns immediately if there are any, otherwise when one changes; after 30 s without a change, the
        result is empty.
        """

        deadline = self._clock.now() + LISTEN_S
        while True:
            changed = self._changed
            newer = {}
            for key, seen in snapshot_ids.items():
                counter, value = self._values.get(key, (0, None))
                if seen is None or tuple(seen) != (self._epoch, counter):
                    newer[key] = (self._epoch, counter), value
            if newer:
                return newer
            self.waiting += 1
            try:
                await self._clock.wait_for(changed.wait(), deadline - self._clock.now())
            except TimeoutError:
                return {}
            finally:
                self.waiting -= 1

    def _is_published(self, key: str, value: Any) -> bool:
        known = self._values.get(key)
        return value is None if known is None else known[1] == value


class LongPollClient:
    """The listening side, one per process and instance."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._watchers: dict[str, list[Watcher]] = {}
        self._values: dict[str, Any] = {}
        self._seen: SnapshotId = (0, 0)
        #: The epoch of the newest known controller, even if no change from it has been applied yet.
        self._epoch = 0
        self._wanted: set[str] = set()
        self._fetch_wanted = asyncio.Event()
        self._advanced = asyncio.Event()
        self._left: list[Callable[[str], None]] = []
        self._ended: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopped = False
        self._starting: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None
        #: Time since which fetches have failed; None if the last one succeeded, or before the first one.
        self.silent_since: float | None = None
        # For the metrics: when the newest change was published.
        self._published_at: float | None = None
        self._delays = LatencyHistogram()
        self._fetches = self._fetch_failures = 0

    def samples(self) -> list[MetricSample]:
        """Return the metrics; see `daskserve.telemetry.table.Source`."""
        labels = (self._cluster.instance,)
        return [
            ("long_poll_delay_seconds", labels, self._delays),
            ("long_poll_fetches", labels, self._fetches),
            ("long_poll_fetch_failures", labels, self._fetch_failures),
        ]

    @property
    def snapshot_id(self) -> SnapshotId:
        """The newest change that this process has applied."""
        return self._seen

    @property
    def is_started(self) -> bool:
        """Whether `start` has completed."""
        return self._unsubscribe is not None

    async def start(self) -> None:
        """Subscribe; idempotent. No change after it returns is missed."""
        if self._starting is None or _has_failed(self._starting):
            self._starting = asyncio.create_task(self._start(), name="daskserve-long-poll-start")
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        self._is_stopped = False
        self._unsubscribe = await self._cluster.subscribe(self._on_message)
        self._tasks.append(asyncio.create_task(self._keep_fetching(), name="daskserve-long-poll"))
        PROCESS.add(self)

    async def stop(self) -> None:
        """Unsubscribe and clear all state; idempotent."""
        PROCESS.remove(self)
        self._is_stopped = True
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._watchers.clear()
        if self._unsubscribe is not None:
            unsubscribe, self._unsubscribe = self._unsubscribe, None
            await unsubscribe()

    def watch(self, key: str, watcher: Watcher) -> Callable[[], None]:
        """Call ``watcher(value)`` now, if known, and on every change; return a function that stops this."""
        self._watchers.setdefault(key, []).append(watcher)
        if key in self._values:
            watcher(self._values[key])
        else:
            self._wanted.add(key)
            self._fetch_wanted.set()

        def stop_watching() -> None:
            watchers = self._watchers.get(key, [])
            if watcher in watchers:
                watchers.remove(watcher)
            if not watchers:
                self._watchers.pop(key, None)
                self._values.pop(key, None)
                self._wanted.discard(key)  # otherwise each later update would wait for a fetch

        return stop_watching

    def on_worker_left(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call ``callback(worker address)`` when a worker leaves; return a function that stops this."""
        self._left.append(callback)
        return partial(self._left.remove, callback)

    def on_ended(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` when the instance has been shut down."""
        self._ended.append(callback)

    def refresh(self) -> None:
        """Fetch all values, because messages may have been missed."""
        self.silent_since = None  # a scheduler that has restarted starts a controller only now
        self._fetch_all()

    def _fetch_all(self) -> None:
        self._wanted.update(self._watchers)
        self._fetch_wanted.set()

    def ask(self) -> None:
        """Fetch from the controller now, without an update message."""
        self._fetch_wanted.set()

    async def wait_for_snapshot(self, snapshot_id: SnapshotId, timeout_s: float) -> None:
        """Return when this process has applied that change or a newer one; raise `TimeoutError` if this takes
        too long."""
        deadline = self._clock.now() + timeout_s
        while self._seen < tuple(snapshot_id):
            await self._clock.wait_for(self._advanced.wait(), max(0.0, deadline - self._clock.now()))

    def _on_message(self, message: Any) -> None:
        kind = message.get("kind")
        if kind == UPDATE:
            self._on_update(message)
        elif kind == CONTROLLER:
            # Updates of the new controller may have arrived before this message, so fetch everything.
            self._cluster.forget_controller()
            self._fetch_wanted.set()
        elif kind == WORKERS:
            for worker in message["left"]:
                for left in list(self._left):
                    left(worker)
        elif kind == ENDED:
            for ended in list(self._ended):
                ended()

    def _on_update(self, message: Any) -> None:
        epoch, counter = message["epoch"], message["counter"]
        if epoch < self._epoch or (epoch, counter) <= self._seen:
            return
        self._epoch = epoch
        self.silent_since = None
        self._published_at = message.get("at")
        if (epoch, counter) != (self._seen[0], self._seen[1] + 1):
            # A gap, or a new controller: the known values may be outdated.
            if epoch != self._seen[0]:
                self._cluster.forget_controller()
            self._fetch_all()
            return
        for key, is_inline, value in message["changes"]:
            if key not in self._watchers:
                continue
            if is_inline and key not in self._wanted:
                self._apply(key, value)
            else:
                self._wanted.add(key)
        if self._wanted:
            self._fetch_wanted.set()  # `_seen` advances when the values have arrived
        else:
            self._advance((epoch, counter))

    def _advance(self, snapshot_id: SnapshotId) -> None:
        self._seen = snapshot_id
        if self._published_at is not None:
            # Measured with the clocks of two hosts, which may differ slightly.
            self._delays.observe(max(0.0, self._clock.wall() - self._published_at))
            self._published_at = None
        waiters, self._advanced = self._advanced, asyncio.Event()
        waiters.set()

    def _apply(self, key: str, value: Any) -> None:
        watchers = self._watchers.get(key)
        if watchers is None:
            return  # the watchers have left, so the value would become outdated
        self._values[key] = value
        for watcher in list(watchers):
            try:
                watcher(value)
            except Exception:
                # The error must not affect the other watchers or the listener.
                logger.exception("A watcher of %s failed", key)

    async def _keep_fetching(self) -> None:
        delay_s = 0.01
        # Not only cancelled: a call in progress may turn the cancellation into another error.
        while not self._is_stopped:
            try:
                await self._clock.wait_for(self._fetch_wanted.wait(), SILENCE_S)
            except TimeoutError:
                pass
            self._fetch_wanted.clear()
            self._fetches += 1
            try:
                await self._fetch()
                delay_s = 0.01
                self.silent_since = None
            except (ServeError, OSError, TimeoutError) as error:
                # The controller is busy or being replaced. Keep using the known values.
                level = logging.DEBUG if isinstance(error, NotRunningError) else logging.INFO
                self._fetch_failures += 1
                if self.silent_since is None:
                    self.silent_since = self._clock.now()
                self._cluster.forget_controller()
                logger.log(level, "A fetch from the controller failed and is retried: %s", error)
                self._fetch_wanted.set()
                await self._clock.sleep(delay_s)
                delay_s = min(1.0, delay_s * 2)

    async def _fetch(self) -> None:
        keys = sorted(self._wanted & set(self._watchers))
        controller = await self._cluster.controller()
        answer = await self._clock.wait_for(self._cluster.call(controller, "fetch", keys=keys), FETCH_S)
        snapshot_id = (answer["epoch"], answer["counter"])
        if snapshot_id[0] < self._epoch:
            raise UnavailableError(f"Controller {snapshot_id[0]} answered but was replaced by {self._epoch}.")
        self._epoch = snapshot_id[0]
        if snapshot_id < self._seen:
            self._fetch_wanted.set()
            return
        missed = snapshot_id[0] != self._seen[0] or snapshot_id[1] > self._seen[1]
        unfetched = set(self._watchers) - set(keys)
        if missed and unfetched:
            # The answer is newer than the known values of the other keys, so fetch all from one snapshot.
            self._fetch_all()
            return
        self._wanted.difference_update(keys)
        for key in keys:
            self._apply(key, answer["values"][key])
        if snapshot_id > self._seen:
            self._advance(snapshot_id)


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
