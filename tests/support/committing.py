"""A program that commits to a store until it is killed, and prints every commit that returned.

Run as ``python committing.py URL``. Commit number ``n`` writes ``count`` and ``k<n>``, and removes the record
that is ten commits old, so that a partial commit is visible.
"""

from __future__ import annotations

import asyncio
import sys

from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.store import journal as store_journal
from daskserve.cluster.store.opening import open_store

KEPT = 10


def records_after(count: int) -> dict[str, bytes]:
    """Return the records of a store after ``count`` commits."""
    if not count:
        return {}
    kept = {f"k{number}": value_of(number) for number in range(max(1, count - KEPT + 1), count + 1)}
    return {"count": b"%d" % count, **kept}


def value_of(number: int) -> bytes:
    return b"%d," % number * 500


async def main(url: str) -> None:
    store_journal.COMPACT_OBJECTS = 7
    store_journal.BYTES_PER_OBJECT = 1 << 20
    store = open_store(url, "i")
    await store.open()
    epoch = await store.claim_epoch()
    number = int((await store.load()).get("count", b"0"))
    while True:
        number += 1
        change: dict[str, bytes | None] = {"count": b"%d" % number, f"k{number}": value_of(number)}
        change[f"k{number - KEPT}"] = None
        await store.commit(epoch, StoreChange(change))
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
