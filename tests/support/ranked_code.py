"""User code for test_replica_context.py, in a separate module because child processes import it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

from daskserve.common.types import ReplicaRank
from daskserve.context import get_replica_context


def facts() -> dict[str, Any]:
    """Return the values of the replica's context."""
    found = get_replica_context()
    return {
        "app_name": found.app_name,
        "deployment": found.deployment,
        "replica_tag": found.replica_tag,
        "unique_id": found.replica_id.unique_id,
        "code_version": found.code_version,
        "object": type(found.servable_object).__name__,
        "rank": found.rank,
        "world_size": found.world_size,
    }


class Ranked:
    """Records the ranks that it gets."""

    def __init__(self) -> None:
        self.first = facts()
        self.told: list[tuple[Any, ReplicaRank, ReplicaRank]] = []
        self.asked = 0
        self.go = threading.Event()
        self.seen: list[int] = []
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self.watch,), daemon=True).start()

    def watch(self) -> None:
        self.go.wait()
        self.seen.append(get_replica_context().rank.rank)

    def reconfigure(self, user_config: Any, rank: ReplicaRank) -> None:
        if rank.rank == 13:
            raise ValueError("an unlucky rank")
        self.told.append((user_config, rank, get_replica_context().rank))

    def record_replica_metadata(self) -> dict[str, Any]:
        return {"address": f"tcp://{get_replica_context().replica_id}", "first": self.first["rank"].rank}

    async def record_routing_stats(self) -> dict[str, Any]:
        self.asked += 1
        return {"asked": self.asked}

    def __call__(self) -> dict[str, Any]:
        return facts()

    async def on_loop(self) -> dict[str, Any]:
        return await asyncio.to_thread(facts)

    def history(self) -> list[Any]:
        return self.told

    def background(self) -> list[int]:
        self.go.set()
        while not self.seen:
            pass
        return self.seen


class Unranked(Ranked):
    """Its ``reconfigure`` takes no rank."""

    def reconfigure(self, user_config: Any) -> None:  # type: ignore[override]
        self.told.append(user_config)


class AsyncRanked(Ranked):
    """Its ``reconfigure`` takes the rank by keyword, on its loop."""

    async def reconfigure(self, user_config: Any, *, rank: ReplicaRank | None = None) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        assert rank is not None
        super().reconfigure(user_config, rank)
